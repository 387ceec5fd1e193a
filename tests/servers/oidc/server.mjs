// A real OAuth server for tests: npm's oidc-provider on a free port of 127.0.0.1.
//
// Its people agree to everything at once, or to nothing, as POST /control {"deny": …} says. The first line of its
// output is its address. Tokens live as long as {"ttl": seconds} says. It ends when its standard input does.
import { createServer } from "node:http";
import { Provider } from "oidc-provider";

const said = { deny: false, ttl: 3600 };
const seen = { token: 0 };
const server = createServer();
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const issuer = `http://127.0.0.1:${server.address().port}`;

const provider = new Provider(issuer, {
  clients: [
    {
      client_id: "native",
      application_type: "native",
      token_endpoint_auth_method: "none",
      grant_types: ["authorization_code", "refresh_token", "urn:ietf:params:oauth:grant-type:device_code"],
      redirect_uris: ["http://127.0.0.1/callback"],
    },
    {
      client_id: "machine",
      client_secret: "a secret+with signs",
      grant_types: ["client_credentials"],
      response_types: [],
      redirect_uris: [],
    },
  ],
  scopes: ["calendar.read", "calendar.write"],
  cookies: { keys: ["only for tests"] },
  pkce: { required: () => true },
  features: {
    devInteractions: { enabled: false },
    deviceFlow: {
      enabled: true,
      userCodeInputSource: async (ctx, form) => { ctx.body = form; },
      userCodeConfirmSource: async (ctx, form) => { ctx.body = form; },
      successSource: async (ctx) => { ctx.body = "done"; },
    },
    clientCredentials: { enabled: true },
    revocation: { enabled: true },
    introspection: { enabled: true, allowedPolicy: async () => true },
  },
  issueRefreshToken: async () => true,
  rotateRefreshToken: true,
  ttl: {
    AccessToken: () => said.ttl, ClientCredentials: () => said.ttl, RefreshToken: 3600, DeviceCode: 600,
    AuthorizationCode: 60, Grant: 3600, Interaction: 600, Session: 3600,
  },
  interactions: { url: (ctx, interaction) => `/agree/${interaction.uid}` },
  findAccount: async (ctx, id) => ({ accountId: id, claims: async () => ({ sub: id }) }),
  renderError: async (ctx, out) => { ctx.body = JSON.stringify(out); },
});

async function agree(request, response) {
  const { prompt, params, session, grantId } = await provider.interactionDetails(request, response);
  if (said.deny) {
    const refusal = { error: "access_denied", error_description: "not today" };
    return provider.interactionFinished(request, response, refusal, { mergeWithLastSubmission: false });
  }
  if (prompt.name === "login") {
    return provider.interactionFinished(request, response, { login: { accountId: "somebody" } });
  }
  const grant = grantId
    ? await provider.Grant.find(grantId)
    : new provider.Grant({ accountId: session.accountId, clientId: params.client_id });
  grant.addOIDCScope((prompt.details.missingOIDCScope ?? []).join(" "));
  const consent = { grantId: await grant.save() };
  return provider.interactionFinished(request, response, { consent }, { mergeWithLastSubmission: true });
}

const answer = provider.callback();
server.on("request", (request, response) => {
  if (request.url === "/token") seen.token += 1;
  if (request.url === "/control") {
    let body = "";
    request.on("data", (piece) => { body += piece; });
    request.on("end", () => {
      if (body) Object.assign(said, JSON.parse(body));
      response.end(JSON.stringify({ ...said, ...seen }));
    });
  } else if (request.url.startsWith("/agree/")) {
    agree(request, response).catch((error) => { response.statusCode = 500; response.end(String(error)); });
  } else {
    answer(request, response);
  }
});
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
console.log(issuer);
