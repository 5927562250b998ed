"""Makes token files: texts are encoded by workers, and the files are written, resumed and merged."""
