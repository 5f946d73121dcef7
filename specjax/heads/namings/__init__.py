"""The namings that heads are published in: readers of folders (`_files`), writers (`_writing`)."""
