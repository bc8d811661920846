/** Where every prompt and every token went, and what it cost. The sums are shown, so that they can be checked. */
import { useJob } from "../../data/job";
import { percent, short, whole, words } from "../../format";
import { Badge } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import type { Account, Price, TokenAccountSchema } from "../../rest";
import { promiseOf } from "./promise";
import "./account.css";

export default function AccountView() {
  const { data, error } = useJob<Account>("/account", 2);
  if (!data) return <><h1>Account</h1>{error ? <Refused error={error} /> : <p className="empty">Loading …</p>}</>;
  const { prompts, tokens } = data;
  const { tone, words: promise } = promiseOf(data);
  return (
    <>
      <div className="head">
        <h1>Account</h1>
        <Badge tone={tone}>{promise}{prompts.drawn > 0 && tokens.missing !== null && `, ${whole(tokens.missing)} tokens missing`}</Badge>
      </div>
      <div className="grid account">
        <section className="card">
          <h2>Prompts</h2>
          <Sum all={["drawn", prompts.drawn]} parts={[["trained", prompts.trained], [tokens.waiting, prompts.in_flight], ["dropped", prompts.dropped], ["lost", prompts.lost]]} />
          <p className="muted small">Trained twice: {whole(prompts.twice)}. Dropped ones were replaced: their groups were too old, without a gradient, or set aside.</p>
        </section>
        <section className="card">
          <h2>Tokens</h2>
          {tokens.generated === null ? (
            <p className="empty">{tokens.told}</p>
          ) : (
            <>
              <Sum all={["generated", tokens.generated]} parts={partsOf(tokens)} />
              <p className="muted small">{tokens.told}</p>
            </>
          )}
          <NotTrained reasons={tokens.not_trained ?? {}} />
        </section>
        {data.cost && data.cost.length > 0 && <Cost lines={data.cost} />}
        {data.money.length > 0 && <Money prices={data.money} tokens={tokens} />}
      </div>
    </>
  );
}

function partsOf(tokens: TokenAccountSchema): [string, number][] {
  const discarded = Object.entries(tokens.discarded).map(([reason, count]): [string, number] => [`discarded: ${words(reason)}`, count]);
  return [["delivered", tokens.delivered ?? 0], [tokens.waiting, tokens.in_flight ?? 0], ...discarded, ["missing", tokens.missing ?? 0]];
}

function NotTrained({ reasons }: { reasons: Record<string, number> }) {
  const entries = Object.entries(reasons).filter(([, count]) => count > 0);
  if (entries.length === 0) return null;
  return <p className="small">Delivered, and not trained on: {entries.map(([reason, count]) => `${words(reason)} ${whole(count)}`).join(", ")}.</p>;
}

function Sum({ all, parts }: { all: [string, number]; parts: readonly [string, number][] }) {
  const [name, total] = all;
  return (
    <table>
      <tbody>
        {parts.map(([part, count]) => (
          <tr key={part}>
            <th scope="row">{part}</th>
            <td className="number">{whole(count)}</td>
            <td className="number muted">{percent(total > 0 ? count / total : 0)}</td>
            <td className="part"><span className="part-bar" style={{ width: `${total > 0 ? Math.min(100, (count / total) * 100) : 0}%` }} /></td>
          </tr>
        ))}
        <tr className="total">
          <th scope="row">{name}</th>
          <td className="number"><strong>{whole(total)}</strong></td>
          <td />
          <td />
        </tr>
      </tbody>
    </table>
  );
}

function Cost({ lines }: { lines: NonNullable<Account["cost"]> }) {
  return (
    <section className="card">
      <h2>Cost</h2>
      <table>
        <tbody>{lines.map((one) => <tr key={one.label}><th scope="row">{one.label}</th><td>{one.value}</td></tr>)}</tbody>
      </table>
      <p className="muted small">In the currency of the job's prices. A device is paid from when it is reserved until the job ends.</p>
    </section>
  );
}

function Money({ prices, tokens }: { prices: readonly Price[]; tokens: TokenAccountSchema }) {
  const hour = prices.reduce((sum, one) => sum + one.instances * one.price_per_hour, 0);
  const discarded = Object.values(tokens.discarded).reduce((sum, one) => sum + one, 0);
  return (
    <section className="card">
      <h2>Pools</h2>
      <div className="wide" tabIndex={0} role="region" aria-label="Prices">
        <table>
          <thead>
            <tr><th scope="col">Role</th><th scope="col" className="number">Instances</th><th scope="col" className="number">An hour each</th><th scope="col" className="number">A million tokens</th></tr>
          </thead>
          <tbody>
            {prices.map((one) => (
              <tr key={one.role}>
                <td>{one.role}</td>
                <td className="number">{whole(one.instances)}</td>
                <td className="number">{short(one.price_per_hour)}</td>
                <td className="number">{short(one.price_per_million_tokens)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p>Together {short(hour)} an hour, in the currency of the job's prices. {percent(tokens.generated ? discarded / tokens.generated : 0)} of the tokens were discarded.</p>
    </section>
  );
}
