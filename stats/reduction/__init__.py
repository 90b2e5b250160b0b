"""The same estimates from less variance, by control variates (definitions, "Martingale control variates")."""
