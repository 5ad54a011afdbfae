"""The learner's process beside the server: what runs in it, and how it is started, stopped and listened to."""
