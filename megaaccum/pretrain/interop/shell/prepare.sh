# Runs a command in the jail. Scripts source files of the home folder, which is hidden, and /etc/profile, which sets
# another PATH: the tools are functions of bash too. ulimit, which may raise nothing here, does nothing.
mkdir -p "$HOME"
for name in .bashrc .bash_profile .profile; do [ -e "$HOME/$name" ] || : > "$HOME/$name"; done
tools=${PATH%%:*}
for name in $(ls "$tools"); do set -- "BASH_FUNC_$name%%=() { $tools/$name \"\$@\"; }" "$@"; done
exec env "BASH_FUNC_ulimit%%=() { :; }" "$@"
