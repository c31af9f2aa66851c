"""HTTP client of a served model."""
