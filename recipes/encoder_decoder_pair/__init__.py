"""Make pairs of encoder-decoders in minutes: a T5 that writes records out, a Whisper that names tones, and drafts."""
