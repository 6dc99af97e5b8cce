"""The operations of the REST API, in packages by what they are about; each contributes its own."""
