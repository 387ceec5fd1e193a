//! Ask an agent of a running swarm: `ask BUNDLE AGENT TEXT`, `ask --stream BUNDLE AGENT TEXT`. Ctrl-C cancels the question.
//! `ask certified` speaks the line protocol of `gdn certify client`, for the kernel in GOONDAN_RUN_DIR.

mod certified;
mod link;
#[cfg(test)]
mod replayed;
mod session;
mod wire;

use std::io::Write;
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};

use link::{Link, Over};
use session::Told;

const DEADLINE_MS: u64 = 120_000;
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupted(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = if arguments == ["certified"] {
        match std::env::var("GOONDAN_RUN_DIR") {
            Ok(run_dir) => certified::run(&run_dir),
            Err(_) => Err(Over { code: "E_RUN_DIR".into(), message: "GOONDAN_RUN_DIR is not set".into() }),
        }
    } else {
        let stream = arguments.first().map_or(false, |first| first == "--stream");
        arguments.drain(..usize::from(stream));
        match &arguments[..] {
            [bundle, agent, text] => link::run_dir_of(bundle).and_then(|run_dir| ask(&run_dir, agent, text, stream)),
            _ => {
                eprintln!("usage: ask [--stream] BUNDLE AGENT TEXT, or: ask certified");
                exit(2);
            }
        }
    };
    if let Err(Over { code, message }) = done {
        eprintln!("{code}: {}", plain(&message));
        exit(1);
    }
}

fn ask(run_dir: &str, agent: &str, text: &str, stream: bool) -> Result<(), Over> {
    let handler = interrupted as extern "C" fn(libc::c_int);
    unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
    let mut link = Link::open(run_dir).map_err(|why| Over { code: "E_CONNECT".into(), message: why.to_string() })?;
    let (event_id, mut told) = link.ask("question", agent, text, "default", Some(DEADLINE_MS), stream, true)?;
    loop {
        for (_, what) in told.drain(..) {
            match what {
                Told::Event(news) => show(&news),
                Told::Answer(answer) => {
                    println!("{}", plain(answer["response"].as_str().unwrap_or("")));
                    link.close();
                    return Ok(());
                }
                Told::Error(error) | Told::Refused(error) => {
                    link.close();
                    let text = |key: &str| error[key].as_str().unwrap_or("").to_string();
                    return Err(Over { code: text("code"), message: text("message") });
                }
                Told::Accepted | Told::State(_) => {}
            }
        }
        if INTERRUPTED.swap(false, Ordering::SeqCst) {
            told = link.cancel("cancel", &event_id)?;
            continue;
        }
        told = link.wait(None)?.0;
    }
}

/// One line of what goes on.
fn show(news: &serde_json::Value) {
    let text = |key: &str| plain(news[key].as_str().unwrap_or(""));
    let line = match news["kind"].as_str().unwrap_or("") {
        "text" => text("text"),
        "tool.called" => format!("{} begins", text("toolName")),
        "tool.completed" => format!("{} is done", text("toolName")),
        "tool.failed" => format!("{} failed: {}", text("toolName"), text("code")),
        _ => return,
    };
    let _ = writeln!(std::io::stderr(), "  {line}");
}

/// A text of a model as data: what steers a terminal is left out.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || *c == '\n').collect()
}
