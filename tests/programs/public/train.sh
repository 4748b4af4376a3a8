#!/bin/sh
# as people wrap their trainings
echo "starts on $(uname -s)"
"${PYTHON:-python3}" counts.py "$@"
echo "done"
