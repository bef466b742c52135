"""The environment variables by which a process knows that it is to be watched: whether, where to, and how."""

VARIABLE, FOLDER_VARIABLE, SEED_VARIABLE = "IRIS_SANITIZE", "IRIS_SANITIZE_FOLDER", "IRIS_SANITIZE_SEED"
