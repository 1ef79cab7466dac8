"""What runs a batch on a device: one module per kind of device."""
