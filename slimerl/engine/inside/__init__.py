"""What runs inside an engine process. Imports torch alone, so that it installs into SGLang's own environment."""
