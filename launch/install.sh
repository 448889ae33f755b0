# shellcheck shell=bash
# Sourced by the launch scripts: makes .venv with everything slimerl needs, once per set of requirements.
#   PYTHON   the interpreter to use (default: python3.11)
#   WITH_DEV=1   also what the tests need

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
        if [ -n "${PYTHON:-}" ]; then
            echo "PYTHON=$PYTHON is not a Python 3.11; set it to one" >&2
            return 1
        fi
    done
    echo "Python 3.11 was not found. Install it (Debian 12: apt-get install python3 python3-venv;" >&2
    echo "elsewhere: https://www.python.org/downloads or pyenv install 3.11), or set PYTHON=/path/to/python3.11" >&2
    return 1
}

install() {
    local root=$1 files python wanted
    files=(requirements.txt requirements-sglang.txt requirements-sglang-nodeps.txt)
    [ "${WITH_DEV:-0}" = 1 ] && files+=(requirements-dev.txt)
    cd "$root" || return
    wanted=$(cat "${files[@]}" pyproject.toml | sha256sum)
    # What the tests need is more than what a run needs: either stamp will do for a run.
    if [ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ] || { [ "${WITH_DEV:-0}" = 0 ] && [ "$(cat .venv/installed-base 2>/dev/null)" = "$wanted" ]; }; then
        return
    fi
    python=$(find_python)
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv || {
        echo "$python cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
        return 1
    }
    rm -f .venv/installed .venv/installed-base
    echo "installing into .venv (about 1.6 GB, one to two minutes)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r requirements.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-deps -r requirements-sglang-nodeps.txt
    [ "${WITH_DEV:-0}" = 1 ] && .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r requirements-dev.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-deps --editable .
    echo "$wanted" >.venv/installed
    cat requirements.txt requirements-sglang.txt requirements-sglang-nodeps.txt pyproject.toml | sha256sum >.venv/installed-base
}
