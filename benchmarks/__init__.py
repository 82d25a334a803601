"""What KSD costs against the bare engine and against others: `python -m benchmarks`."""
