"""Being here, this file lets the tests in folders below import `analysis_synthetic`."""
