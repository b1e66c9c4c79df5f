"""Not empty, because libraries read these variables when they are imported, and every command, role and worker begins here."""

import os

# What our commands print is their own; a variable that the user's environment sets stays as it is.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",  # without PyTorch, transformers warns on stderr that it has no models
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",  # datasets draws a bar for every file that it reads
}
for _name, _value in _QUIET.items():
    os.environ.setdefault(_name, _value)
