# Runs in the jail. Input: an archive of the project. Output: one of the files that are newer than the script's start.
# Words: the project's folder, the script's, "git" if it is a repository, the command.
tar -x -f - -C "$1"
if [ -n "$3" ]; then (cd "$1" && mkdir -p .git/objects .git/refs && echo 'ref: refs/heads/main' > .git/HEAD); fi
: > /megaaccum/started
(cd "$2" && shift 3 && exec "$@") < /dev/null >&2
exec tar -c -f - --one-file-system -N /megaaccum/started /megaaccum/records / "$1" 2> /dev/null
