"""`/v1/responses`: OpenAI's Responses API around what chats are made of."""
