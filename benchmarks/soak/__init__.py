"""A soak of the server: thousands of mixed requests, each answer compared with a lone run without speculation."""
