"""Making drafts: data, losses, the loop and what is measured while it runs."""
