#!/usr/bin/python3
"""Runs rdma-core's own test suite, and prints a line for each file and each reason why tests were skipped.

    rdma_core_tests.py TREE DEVICE [FILE..]

TREE is a source tree of rdma-core, FILE a name such as test_mr; without any, all files but those of mlx5 are run.
The exit status is 0 if no test failed. The suite asks the kernel for three things that it does not know of devices of software:
"rdma link show" gets an empty list here, a table of P_Keys in sysfs has the default key, and the interface of each device is lo.
"""

import glob
import importlib.machinery
import os
import re
import subprocess
import sys
import unittest
import unittest.mock

tree, device, *names = sys.argv[1:]
folder = os.path.join(tree, 'tests')
sys.path.insert(0, folder)
sys.argv[1:] = ['--dev', device]
sys.dont_write_bytecode = True
# The modules for mlx5 are half of pyverbs, and script/libibverbs leaves them out: the tests that are run only import them.
for file in glob.glob(os.path.join(folder, '*.py')):
    with open(file) as text:
        for module in re.findall(r'pyverbs\.providers\.mlx5[.\w]*', text.read()):
            sys.modules[module] = unittest.mock.MagicMock()

ask = subprocess.check_output


def answer(command, *arguments, **options):
    if command == ['rdma', 'link', 'show', '-j']:
        return b'[]'
    if command[0] == 'cat' and command[1].startswith('/sys/class/infiniband/' + device) and '/pkeys/' in command[1]:
        return '0xffff\n'
    return ask(command, *arguments, **options)


subprocess.check_output = answer
importlib.machinery.SourceFileLoader('tests', os.path.join(folder, '__init__.py')).load_module()
from args_parser import parser  # noqa: E402 (it is in the folder)
parser.parse_args()
from tests.base import RDMATestCase  # noqa: E402
RDMATestCase.get_net_name = staticmethod(lambda dev, port=None: 'lo')
RDMATestCase.get_ip_mac_address = staticmethod(lambda name: ('127.0.0.1', '00:00:00:00:00:01'))


total, reasons, rows = [0, 0, 0, 0], {}, []
if not names:
    files = sorted(glob.glob(os.path.join(folder, 'test_*.py')))
    names = [os.path.basename(file)[:-3] for file in files]
    names = [name for name in names if 'mlx5' not in name]
for name in names:
    suite = unittest.defaultTestLoader.loadTestsFromName('tests.' + name)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed, error, skipped = len(result.failures), len(result.errors), len(result.skipped)
    # A subtest or a set-up that fails counts, though it is no test of its own.
    row = [max(result.testsRun - failed - error - skipped, 0), failed, error, skipped]
    rows.append((name, row))
    total = [a + b for a, b in zip(total, row)]
    for _, reason in result.skipped:
        reasons.setdefault((name, reason), 0)
        reasons[name, reason] += 1

sys.stderr.flush()
print('| file | ok | failed | error | skipped |\n|---|---|---|---|---|')
for name, row in rows + [('all', total)]:
    print('| ' + ' | '.join([name, *map(str, row)]) + ' |')
for (name, reason), count in reasons.items():
    print(f'skipped: {name}: {count} x {reason}')
sys.exit(total[1] + total[2] > 0)
