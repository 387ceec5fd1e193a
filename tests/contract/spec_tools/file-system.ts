// tools/file-system/index.ts
import type { ToolHandler, ToolContext, JsonValue } from '@goondan/core';
import { join, isAbsolute } from 'path';

export const handlers: Record<string, ToolHandler> = {
  'read': async (ctx: ToolContext, input: { path: string; maxBytes?: number }): Promise<JsonValue> => {
    const targetPath = isAbsolute(input.path)
      ? input.path
      : join(ctx.workdir, input.path);

    const file = Bun.file(targetPath);
    const exists = await file.exists();
    if (!exists) {
      throw new Error(`파일이 존재하지 않습니다: ${targetPath}`);
    }

    const maxBytes = input.maxBytes ?? 100_000;
    const text = await file.text();
    const truncated = text.length > maxBytes;

    return {
      path: targetPath,
      size: file.size,
      truncated,
      content: truncated ? text.slice(0, maxBytes) : text,
    };
  },

  'write': async (ctx: ToolContext, input: { path: string; content: string }): Promise<JsonValue> => {
    const targetPath = isAbsolute(input.path)
      ? input.path
      : join(ctx.workdir, input.path);

    await Bun.write(targetPath, input.content);
    const file = Bun.file(targetPath);

    return {
      path: targetPath,
      size: file.size,
      written: true,
    };
  },
};
