"""Keys and values: accounting without tensors, the pool that holds them."""
