"""The environment variables of the sanitizer: whether to record, in which folder, and the seed of a random schedule."""

VARIABLE, FOLDER_VARIABLE, SEED_VARIABLE = "IRIS_SANITIZE", "IRIS_SANITIZE_FOLDER", "IRIS_SANITIZE_SEED"
