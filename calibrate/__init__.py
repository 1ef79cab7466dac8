"""From a device to a profile: clock, plan, measurement, log, fit, check."""
