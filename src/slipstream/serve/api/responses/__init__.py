"""`/v1/responses`: OpenAI's Responses API, on the parts of chat completions."""
