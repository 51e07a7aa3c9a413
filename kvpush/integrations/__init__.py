"""kvpush inside inference engines."""
