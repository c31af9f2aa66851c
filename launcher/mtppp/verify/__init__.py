"""Whether a deployment gives the same model as a baseline; docs/verify.md tells the method."""
