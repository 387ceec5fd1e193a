/** The same as echo.py. */
export const handlers = {
  same: (context: unknown, input: { text: string }) => input,
};
