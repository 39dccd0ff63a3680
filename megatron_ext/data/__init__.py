"""Loading prepared data: shards as a token stream, an order that resumes exactly, batches for one rank."""
