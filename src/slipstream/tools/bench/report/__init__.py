"""Tables, pages and pictures of results."""
