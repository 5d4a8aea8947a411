# Runs a command as it is.
exec "$@"
