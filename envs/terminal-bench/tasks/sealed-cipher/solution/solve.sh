#!/bin/bash
mkdir -p /app/out
cat > /app/out/vigenere.py <<'END'
import sys

way, key, text = sys.argv[1:]
sign = 1 if way == "encrypt" else -1
out, used = [], 0
for letter in text:
    if letter.isascii() and letter.isalpha():
        first = ord("A") if letter.isupper() else ord("a")
        shift = ord(key.upper()[used % len(key)]) - ord("A")
        letter = chr((ord(letter) - first + sign * shift) % 26 + first)
        used += 1
    out.append(letter)
print("".join(out))
END
