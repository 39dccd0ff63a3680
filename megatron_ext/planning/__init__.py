"""What a sweep's runs must be so that they can be compared: equal compute, equal parameters."""
