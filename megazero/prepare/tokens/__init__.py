"""Token files: texts encoded by workers, written, resumed, merged."""
