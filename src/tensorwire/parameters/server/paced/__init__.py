"""Makes versions where each worker goes at its own pace."""
