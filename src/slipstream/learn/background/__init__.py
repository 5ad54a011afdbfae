"""The learner's process, next to the server's: what runs in it, and how it is started, stopped and listened to."""
