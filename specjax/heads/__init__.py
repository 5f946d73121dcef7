"""Published heads over a target: equations, the namings of their files, and how they draft."""
