# Says hello; --loud says it in capitals.
words="$GREETING $2"
[ "$1" = --loud ] && words=$(printf %s "$words" | tr a-z A-Z)
echo "$words"
