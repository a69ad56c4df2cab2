"""PTX to C++: one function per kernel that runs one thread; memory is checked, barriers and shuffles are calls.

``module`` reads PTX, ``function`` follows the statements of one function, ``operands`` knows what names stand for, and
the instructions themselves are in ``memory``, ``arithmetic``, ``logic``, ``conversion`` and ``control``. ``compile``
puts a kernel together and calls the compiler.
"""
