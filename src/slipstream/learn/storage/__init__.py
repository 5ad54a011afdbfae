"""Where learning keeps what it has: a folder that the server, its learner and an operator share."""
