"""From views to stored estimates: moments as arrays, the bootstrap in parts, calibration, residual branching."""
