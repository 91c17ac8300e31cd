//! From a file of conversations to a flat file of tokens, in the cache. It depends on the tokenizer
//! and on what is trained, not on the context or on packing.
//!
//! ```text
//! codes      u32 [tokens]         a token, plus 2^31 if it is trained
//! documents  u64 [documents, 6]   end in codes, line, first trained token, trained tokens,
//!                                 largest, 1 if a token has text before an answer and some of it
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::setting::Choice;
use serde_json::{Map, Value};
use twox_hash::XxHash3_128;

use super::record;
use super::template::ChatFormat;
use crate::error::{Error, Result, bail, ensure};
use crate::files::io::refuse;
use crate::files::{Array, NumberType, cache, flat, is_table};
use crate::scan::in_segments;
use crate::tables::Tables;
use crate::task::LossOn;
use crate::text::documents::json_lines;
use crate::text::{CHAT_FILES, Encoder, TOKENIZER_FILE, Vocabulary};

/// Part of every key: copies of other versions are made again.
const VERSION: &[u8] = b"ddp conversations 3";
/// Bytes of lines that are tokenized at a time, on all threads.
const GROUP_BYTES: usize = 8 << 20;
/// Set in the code of a token that is trained.
pub(super) const TRAINED: u32 = 1 << 31;

/// Makes tokens of conversations.
pub(crate) struct Coder {
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) format: ChatFormat,
    pub(crate) loss_on: LossOn,
    /// The token after a text.
    pub(crate) end: u32,
    encoder: Encoder,
}

/// Where a document's tokens are, and which of them are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    /// Its file.
    pub(crate) file: usize,
    /// Its first token in the file, and how many there are.
    pub(crate) first: u64,
    pub(crate) tokens: usize,
    /// Its line in a text, counted from 1, or its row in a table, from 0.
    pub(crate) line: u64,
    /// The position of its first trained token, and how many there are.
    pub(crate) first_trained: usize,
    pub(crate) trained: u64,
    pub(crate) largest: u64,
    /// Whether a token has both text before an answer and some of it.
    pub(crate) straddles: bool,
}

/// The tokens of a document, and of `Document` the last four fields.
type Coded = (Vec<u32>, [u64; 4]);

impl Coder {
    /// That of a tokenizer's folder or file.
    pub(crate) fn open(path: &Path, loss_on: LossOn) -> Result<Coder> {
        let path = if path.is_dir() {
            path.join(TOKENIZER_FILE)
        } else {
            path.to_path_buf()
        };
        let vocabulary = Vocabulary::read(&path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let bad = |why| refuse(folder, why);
        let format = ChatFormat::of(&vocabulary).map_err(bad)?;
        let end = vocabulary.end_of_text(format.end.as_deref())?;
        Ok(Coder {
            encoder: Encoder::of(&vocabulary).map_err(bad)?,
            vocabulary: Arc::new(vocabulary),
            format,
            loss_on,
            end,
        })
    }

    /// The tokens of these messages and of the beginning of an answer.
    pub(super) fn prompt(&self, messages: &[Value]) -> Result<Vec<u32>, String> {
        let template = self.format.template.as_ref().ok_or(
            "expected a tokenizer with a chat template, got one without; help: give a model that is made for \
             chats, or put a chat_template.jinja beside tokenizer.json",
        )?;
        let conversation = template.conversation(messages, &Map::new());
        let text = conversation.text(0..0, messages.len(), true)?;
        Ok(self.encoder.encode_placed(&text.text)?.0)
    }

    /// Everything on which tokens depend, besides the records.
    fn request(&self) -> String {
        let mut hash = XxHash3_128::new();
        let files = self.vocabulary.files();
        let files = files.filter(|(name, _)| *name != CHAT_FILES[2]);
        let files = files.flat_map(|(name, bytes)| [name.as_bytes(), bytes]);
        for part in [VERSION, self.loss_on.name().as_bytes()]
            .into_iter()
            .chain(files)
        {
            hash.write(&(part.len() as u64).to_le_bytes());
            hash.write(part);
        }
        format!("conversations {:032x}", hash.finish_128())
    }

    /// The tokens of a record. An error says what is wrong with it.
    fn code(&self, line: &str) -> Result<Coded, String> {
        let written = record::write(line, self.format.template.as_ref(), self.loss_on)?;
        let (tokens, places) = self.encoder.encode_placed(&written.text)?;
        let mut straddles = false;
        let code = |(token, (start, end)): (&u32, (usize, usize))| {
            // A token of no bytes is where it is.
            let next = written.trained.partition_point(|range| range.end <= start);
            let answer = written.trained.get(next);
            let answer = answer.filter(|answer| end > answer.start || start == answer.start);
            straddles |= answer.is_some_and(|answer| start < answer.start);
            token | answer.map_or(0, |_| TRAINED)
        };
        let mut codes: Vec<u32> = tokens.iter().zip(places).map(code).collect();
        if written.is_plain {
            self.complete(&mut codes);
        }
        // Nothing predicts the first token.
        codes.iter_mut().take(1).for_each(|code| *code &= !TRAINED);
        let is_trained = |code: &&u32| **code & TRAINED != 0;
        let trained = codes.iter().filter(is_trained).count();
        let first = codes.iter().position(|code| is_trained(&code));
        let Some(first) = first else {
            bail!(
                "expected a token to train on, got none of {}: {}; help: correct or remove the line",
                codes.len(),
                written.why_none
            );
        };
        let largest = codes.iter().map(|code| code & !TRAINED).max();
        let largest = largest.unwrap_or(0).into();
        let facts = [first as u64, trained as u64, largest, straddles.into()];
        Ok((codes, facts))
    }

    /// Begins and ends a text as the tokenizer does.
    fn complete(&self, codes: &mut Vec<u32>) {
        let begin = self.encoder.begin();
        let begin = begin.strip_suffix(&[self.end]).unwrap_or(begin);
        codes.splice(0..0, begin.iter().copied());
        if codes.last().is_none_or(|code| code & !TRAINED != self.end) {
            codes.push(self.end | TRAINED);
        }
    }
}

/// A file of conversations as tokens.
#[derive(Debug)]
pub(crate) struct ChatFile {
    pub(crate) path: PathBuf,
    pub(crate) codes: Array,
    pub(crate) documents: Vec<Document>,
    /// The checksums of its arrays.
    pub(crate) content: String,
}

impl ChatFile {
    /// Opens file number `file`, which is converted unless it was before.
    pub(crate) fn open(
        path: &Path,
        file: usize,
        coder: &Coder,
        tables: Option<&'static dyn Tables>,
        cache_dir: Option<&Path>,
    ) -> Result<ChatFile> {
        let copy = cache::converted(path, cache_dir, &coder.request(), |to| {
            convert(path, to, coder, tables)
        })?;
        let name = path.display().to_string();
        let contents = flat::open(&copy, &name)?;
        let find = |key: &str| -> Result<Array> {
            let found = contents.find(key).map_err(|why| refuse(&copy, why))?;
            found
                .cloned()
                .ok_or_else(|| refuse(&copy, format!("it lacks {key}")))
        };
        let (codes, table) = (find("codes")?, find("documents")?);
        let mut numbers = vec![0; table.rows() as usize * FACTS];
        table.read_i64(0, &mut numbers)?;
        let (mut documents, mut first) = (Vec::with_capacity(table.rows() as usize), 0);
        for facts in numbers.chunks_exact(FACTS) {
            let [end, line, first_trained, trained, largest, straddles] =
                [0, 1, 2, 3, 4, 5].map(|at| facts[at] as u64);
            documents.push(Document {
                file,
                first,
                tokens: (end - first) as usize,
                line,
                first_trained: first_trained as usize,
                trained,
                largest,
                straddles: straddles != 0,
            });
            first = end;
        }
        let sums = contents
            .about
            .arrays
            .iter()
            .flat_map(|entry| entry.xxh3.clone());
        Ok(ChatFile {
            path: path.into(),
            codes,
            documents,
            content: sums.collect(),
        })
    }

    /// Where a document is, for messages.
    pub(crate) fn place(&self, document: &Document) -> String {
        place(&self.path, document.line)
    }
}

/// Numbers of a document.
const FACTS: usize = 6;

/// Writes the tokens of the file `source` to `to`.
fn convert(
    source: &Path,
    to: &Path,
    coder: &Coder,
    tables: Option<&'static dyn Tables>,
) -> Result<()> {
    flat::write(to, |writer| {
        writer.begin("codes", NumberType::U32, &[])?;
        let (mut documents, mut end) = (Vec::new(), 0);
        let mut write = |group: &mut Vec<(u64, String)>| {
            let code = |index: u64| {
                let (line, text) = &group[index as usize];
                coder
                    .code(text)
                    .map_err(|why| Error::Data(format!("{}: {why}", place(source, *line))))
            };
            let coded = in_segments(0..group.len() as u64, code)?;
            for ((line, _), (codes, facts)) in group.drain(..).zip(coded) {
                end += codes.len() as u64;
                documents.extend([end, line].into_iter().chain(facts));
                writer.write_numbers(&codes, u32::to_le_bytes)?;
            }
            Ok(())
        };
        let (mut group, mut bytes) = (Vec::new(), 0);
        let mut read = |line: u64, text: &str| -> Result<()> {
            group.push((line, text.to_string()));
            bytes += text.len();
            if bytes < GROUP_BYTES {
                return Ok(());
            }
            bytes = 0;
            write(&mut group)
        };
        match (is_table(source), tables) {
            (false, _) => json_lines(source, &mut read)?,
            (true, Some(tables)) => tables.records(source, &mut read)?,
            (true, None) => {
                return Err(refuse(
                    source,
                    "this program does not read tables; help: write .jsonl",
                ));
            }
        }
        write(&mut group)?;
        let what = "expected conversations, got none; help: give a file with some";
        ensure!(end > 0, "{}: {what}", source.display());
        writer.begin("documents", NumberType::U64, &[FACTS])?;
        writer.write_numbers(&documents, u64::to_le_bytes)?;
        Ok(flat::About {
            source: Some(source.display().to_string()),
            ..flat::About::default()
        })
    })
}

/// The place of a record, for messages.
fn place(path: &Path, line: u64) -> String {
    let kind = if is_table(path) { "row" } else { "line" };
    format!("{}, {kind} {line}", path.display())
}
