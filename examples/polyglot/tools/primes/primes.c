/* C: one JSON text on standard input, {"export": "count", "input": {"below": 100}, "ctx": {…}}, and one on standard output.
 * The arguments fit the schema in goondan.yaml already: `below` is there, an integer from 0 to 50,000,000. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    char *request = NULL;
    size_t size = 0;
    if (getline(&request, &size, stdin) < 0) return 1;
    const char *input = strstr(request, "\"input\"");
    const char *found = input ? strstr(input, "\"below\"") : NULL;
    const char *colon = found ? strchr(found, ':') : NULL;
    if (!colon) {
        puts("{\"error\": {\"message\": \"below is missing\"}}");
        return 0;
    }
    long below = strtol(colon + 1, NULL, 10), count = 0;
    char *composite = calloc((size_t)below + 1, 1);
    if (!composite) {
        puts("{\"error\": {\"message\": \"there is no memory for so many numbers\"}}");
        return 0;
    }
    for (long n = 2; n < below; n++) {
        if (composite[n]) continue;
        count++;
        for (long m = n * n; m < below; m += n) composite[m] = 1;
    }
    printf("{\"output\": %ld}\n", count);
    return 0;
}
