use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ddp_kernels::budget::within;
use ddp_kernels::panics::caught;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Cell, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value};

use super::marks::{MARKS, with_marks};

/// The compiled templates, and whether one needed too much: it gets no second try.
#[derive(Debug)]
pub(super) struct Engine {
    templates: Environment<'static>,
    exceeds: Arc<AtomicBool>,
}

/// The longest template, and memory for each of its bytes: the parser calls itself for each
/// part of a part.
const SOURCE_MAX: usize = 256 << 10;
const STACK_OF_BYTE: usize = 4 << 10;
/// Steps of a template for one conversation, for each of its messages, and bytes of its texts for
/// one more. Usual templates take some hundreds for each message; 64 bytes of text count as one.
const STEPS: u64 = 300_000;
const STEPS_OF_MESSAGE: u64 = 2_000;
const BYTES_OF_STEP: u64 = 4;
const STEPS_MAX: u64 = 5_000_000;
/// For values that are nested as deep as these steps allow: up to 750 bytes a level are needed.
const STACK_BYTES: usize = 512 << 20;
/// What steps do not bound: texts of lists that repeat a text, and comparing lists of equal lists.
/// The memory is that of each thread that writes conversations, and is bounded in programs with the
/// allocator of `ddp_kernels::budget`, as `ddp-train` is one.
const MEMORY_BYTES_MAX: usize = 256 << 20;
/// The longest text: this, and so many times the texts of the conversation.
const TEXT_MAX: u64 = 1 << 20;
const TEXT_TIMES: u64 = 16;
const TIME_MAX: Duration = Duration::from_secs(120);
/// The most levels and bytes of what `tojson` writes, and spaces of each level.
const DEPTH_MAX: usize = 200;
const JSON_MAX: usize = 4 << 20;
const INDENT_MAX: usize = 100;

/// Compiles templates by name.
pub(super) fn engine(sources: BTreeMap<String, String>) -> Result<Engine, String> {
    if sources.values().any(|source| source.len() > SOURCE_MAX) {
        return Err(format!(
            "the chat template: expected at most {SOURCE_MAX} bytes, got more; help: give a shorter one"
        ));
    }
    let bytes: usize = sources.values().map(String::len).sum();
    let thread = thread::Builder::new().stack_size((1 << 20) + STACK_OF_BYTE * bytes);
    let compiled = thread.spawn(move || compile(sources));
    let compiled = compiled.map_err(|error| format!("a thread for the chat template: {error}"))?;
    let failed =
        "the chat template: expected one that can be compiled, got another; help: shorten it";
    Ok(Engine {
        templates: compiled.join().map_err(|_| failed)??,
        exceeds: Arc::default(),
    })
}

fn compile(sources: BTreeMap<String, String>) -> Result<Environment<'static>, String> {
    let mut engine = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
    engine.set_syntax(syntax.map_err(|error| error.to_string())?);
    engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    engine.add_function("raise_exception", |message: String| {
        Err::<Cell, _>(Error::new(ErrorKind::InvalidOperation, message))
    });
    engine.add_function("strftime_now", |format: String| date(&format));
    engine.add_filter("tojson", to_json);
    // As in Python.
    engine.add_test("iterable", |value: &Cell| {
        !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    engine.add_test("sequence", |value: &Cell| {
        value.as_str().is_some()
            || matches!(
                value.kind(),
                ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
            )
    });
    engine.add_filter("generation", |text: String| {
        format!("{}{text}{}", MARKS[0], MARKS[1])
    });
    for (name, source) in sources {
        // As Jinja ends lines.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let added = engine.add_template_owned(name, with_marks(&source));
        added.map_err(|error| shown(&error))?;
    }
    Ok(engine)
}

/// Messages and variables of a conversation. Copies share the texts.
pub(super) struct Cells {
    messages: Vec<Cell>,
    variables: BTreeMap<String, Cell>,
    steps: u64,
    text_max: u64,
}

/// The bytes of the texts in a value.
fn bytes_of(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.len() as u64,
        Value::Array(all) => all.iter().map(bytes_of).sum(),
        Value::Object(all) => all.values().map(bytes_of).sum(),
        _ => 0,
    }
}

impl Cells {
    pub(super) fn of(messages: &[Value], variables: Map<String, Value>) -> Cells {
        let bytes: u64 = messages
            .iter()
            .chain(variables.values())
            .map(bytes_of)
            .sum();
        let steps = STEPS + STEPS_OF_MESSAGE * messages.len() as u64 + bytes / BYTES_OF_STEP;
        let cell = |(name, value)| (name, Cell::from(Serde(value)));
        Cells {
            steps: steps.min(STEPS_MAX),
            text_max: TEXT_MAX.saturating_add(TEXT_TIMES.saturating_mul(bytes)),
            messages: messages.iter().map(|it| Cell::from(Serde(it))).collect(),
            variables: variables.into_iter().map(cell).collect(),
        }
    }
}

pub(super) fn render(
    engine: &Engine,
    name: &str,
    cells: &Cells,
    written: [Range<usize>; 2],
    answers: bool,
) -> Result<String, String> {
    let mut all = cells.variables.clone();
    let messages = written.map(|range| &cells.messages[range]).concat();
    all.insert("messages".into(), messages.into());
    all.insert("add_generation_prompt".into(), answers.into());
    let (mut templates, name) = (engine.templates.clone(), name.to_string());
    templates.set_fuel(Some(cells.steps));
    let text = bounded(&engine.exceeds, move || {
        let template = templates.get_template(&name);
        let text = template.and_then(|it| it.render(Cell::from(all)));
        text.map_err(|error| shown(&error))
    })?;
    if text.len() as u64 > cells.text_max {
        return Err(format!(
            "the chat template: expected a text of at most {} bytes, got {}; help: give a simpler template",
            cells.text_max,
            text.len()
        ));
    }
    Ok(text)
}

/// What `work` writes, on a thread with a large stack. If it needs too much memory or time, the
/// thread stays until the process ends: it sleeps, or goes on computing.
fn bounded(
    exceeds: &AtomicBool,
    work: impl FnOnce() -> Result<String, String> + Send + 'static,
) -> Result<String, String> {
    let (mib, most_s) = (MEMORY_BYTES_MAX >> 20, TIME_MAX.as_secs());
    let refused = |got: &str| {
        exceeds.store(true, Ordering::Release);
        Err(format!(
            "the chat template: expected to need at most {mib} MiB and {most_s} s for a conversation, got {got}; \
             help: give a simpler template"
        ))
    };
    if exceeds.load(Ordering::Acquire) {
        return refused("one that needed more before");
    }
    let (sender, receiver) = mpsc::channel();
    let needs_more = Arc::new(AtomicBool::new(false));
    let (tells, start) = (Arc::clone(&needs_more), Instant::now());
    let write = move || within(MEMORY_BYTES_MAX, &tells, || caught(work));
    let thread = thread::Builder::new().stack_size(STACK_BYTES);
    let started = thread.spawn(move || sender.send(write()));
    started.map_err(|error| format!("a thread for the chat template: {error}"))?;
    loop {
        match receiver.recv_timeout(Duration::from_millis(20)) {
            Ok(text) => {
                return text.unwrap_or(Err("the chat template: expected text, got a panic".into()));
            }
            Err(_) if needs_more.load(Ordering::Acquire) || start.elapsed() > TIME_MAX => {
                return refused("more");
            }
            Err(_) => {}
        }
    }
}

/// That of Llama 3's templates at midnight, so that the same data give the same tokens on every
/// day. Letters that Python does not know stay.
fn date(mut format: &str) -> String {
    let mut text = String::new();
    while let Some((before, rest)) = format.split_once('%') {
        text += before;
        let letter = rest.strip_prefix('-').unwrap_or(rest);
        let found = letter.chars().next().and_then(|letter| {
            let mut known = DATE.split('|');
            known.find_map(|text| text.strip_prefix(letter))
        });
        let Some(value) = found else {
            (text, format) = (text + "%", rest);
            continue;
        };
        let is_short = letter.len() < rest.len() && value.len() > 1;
        text += value
            .strip_prefix('0')
            .filter(|_| is_short)
            .unwrap_or(value);
        format = &letter[1..];
    }
    text + format
}

/// Letters of `strftime`, each followed by its text on that day.
const DATE: &str = "aFri|AFriday|bJul|BJuly|cFri Jul 26 00:00:00 2024|C20|d26|D07/26/24|e26|f000000|F2024-07-26|G2024|hJul|\
                    H00|I12|j208|k 0|l12|m07|M00|pAM|R00:00|S00|T00:00:00|u5|U29|V30|w5|W30|x07/26/24|X00:00:00|y24|Y2024|\
                    z|Z|%%";

/// How Python's `json.dumps` writes.
struct JsonStyle {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    /// Between items, and between a key and its value.
    separators: [String; 2],
}

/// JSON as Python's `json.dumps` writes it, by default with a space after commas and colons.
fn to_json(value: &Cell, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Cell> = options.get("indent")?;
    let indent = indent
        .filter(|it| !it.is_none())
        .map(|it| match it.as_usize() {
            Some(count) => " ".repeat(count.min(INDENT_MAX)),
            None => it.to_string().chars().take(INDENT_MAX).collect(),
        });
    let separators: Option<Vec<String>> = options.get("separators")?;
    let comma = if indent.is_some() { "," } else { ", " };
    let default = || [comma, ": "].map(String::from);
    let separators = separators.and_then(|both| both.try_into().ok());
    let style = JsonStyle {
        ascii: options.get::<Option<bool>>("ensure_ascii")? == Some(true),
        sorted: options.get::<Option<bool>>("sort_keys")? == Some(true),
        indent,
        separators: separators.unwrap_or_else(default),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(value, 1, &mut text)?;
    Ok(text)
}

/// A number as Python writes it: with an exponent below 0.0001 and from 10^16 on.
fn float(number: f64) -> String {
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').expect("it has an exponent");
    match exponent.parse().unwrap_or(0) {
        -4..16 => format!("{number:?}"),
        exponent => format!("{digits}e{exponent:+03}"),
    }
}

impl JsonStyle {
    /// Writes a value whose items are at this depth.
    fn write(&self, value: &Cell, depth: usize, text: &mut String) -> Result<(), Error> {
        let failed = |why: String| Error::new(ErrorKind::BadSerialization, why);
        let large = || {
            failed(format!(
                "tojson: expected at most {DEPTH_MAX} levels and {JSON_MAX} bytes"
            ))
        };
        if text.len() > JSON_MAX {
            return Err(large());
        }
        let [open, close] = match value.kind() {
            ValueKind::Map => ['{', '}'],
            ValueKind::Seq | ValueKind::Iterable => ['[', ']'],
            _ => {
                let is_float = value.is_number() && !value.is_integer();
                let json = match f64::try_from(value.clone()) {
                    Ok(number) if number.is_finite() && is_float => float(number),
                    _ => serde_json::to_string(value).map_err(|error| failed(error.to_string()))?,
                };
                for letter in json.chars() {
                    if !self.ascii || letter.is_ascii() {
                        text.push(letter);
                        continue;
                    }
                    let units = &mut [0; 2];
                    for unit in letter.encode_utf16(units) {
                        *text += &format!("\\u{unit:04x}");
                    }
                }
                return Ok(());
            }
        };
        if depth > DEPTH_MAX {
            return Err(large());
        }
        let mut items: Vec<Cell> = value.try_iter()?.collect();
        if self.sorted && open == '{' {
            items.sort();
        }
        let line = |depth| match &self.indent {
            Some(indent) => format!("\n{}", indent.repeat(depth)),
            None => String::new(),
        };
        text.push(open);
        for (index, item) in items.iter().enumerate() {
            *text += if index > 0 { &self.separators[0] } else { "" };
            *text += &line(depth);
            if open == '[' {
                self.write(item, depth + 1, text)?;
                continue;
            }
            self.write(&Cell::from(item.to_string()), depth, text)?;
            *text += &self.separators[1];
            self.write(&value.get_item(item)?, depth + 1, text)?;
        }
        if !items.is_empty() {
            *text += &line(depth - 1);
        }
        text.push(close);
        Ok(())
    }
}

fn shown(error: &Error) -> String {
    let what = error
        .detail()
        .map_or(error.kind().to_string(), String::from);
    let line = error
        .line()
        .map_or(String::new(), |line| format!(", line {line}"));
    format!("the chat template (chat_template.jinja, else tokenizer_config.json){line}: {what}")
}
