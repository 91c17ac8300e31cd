//! Which tokens a tokenizer has, according to its `tokenizer.json`; and converts text to tokens and
//! back, by bytes or the crate `tokenizers`. Every build reads the file; only encoding needs the
//! crate.

use std::collections::BTreeMap;
use std::path::Path;

use ddp_kernels::files::read_up_to;
use serde::Deserialize;
use serde_json::Value;
use twox_hash::XxHash3_128;

use crate::error::{Result, bail, ensure};
use crate::files::io::{reading, refuse};
use crate::setting::{END_TOKEN, TOKENIZER};
use crate::task::TOKENS_MAX;

/// The name of the file beside shards, in runs and in checkpoints.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The files beside it that say how conversations are written: special tokens, and the template.
pub const CHAT_FILES: [&str; 3] = [
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// Longer files are refused: vocabularies of 256,000 tokens take 20 to 35 MB.
const BYTES_MAX: u64 = 256 << 20;
/// The same of the files beside it, which take up to 2 MB.
const CHAT_BYTES_MAX: u64 = 16 << 20;

/// The token after a document in vocabularies of our own.
pub(super) const END: &str = "<|endoftext|>";
/// What tokenizers call the token after a document.
const END_TOKENS: [&str; 4] = [END, "<|end_of_text|>", "</s>", "<eos>"];

/// The help if the folder has a tokenizer that lacks `tokenizer.json`, as older models have it.
pub fn help_to_make_tokenizer(folder: &Path) -> Option<String> {
    let has = |name: &str| folder.join(name).is_file();
    let is_old = has("vocab.json") && has("merges.txt") && !has(TOKENIZER_FILE);
    is_old.then(|| {
        format!(
            "it has vocab.json and merges.txt; in Python transformers.AutoTokenizer.from_pretrained(\
             {folder:?}).save_pretrained({folder:?}) makes {TOKENIZER_FILE} of them"
        )
    })
}

/// Refuses a link out of its folder, except to the cache of the hub: such files are copied into
/// exports, and the author of a folder must not choose files of this machine for them.
pub fn check_link(path: &Path) -> Result<(), String> {
    let folder = path.parent().and_then(|it| it.canonicalize().ok());
    let there = path.canonicalize().ok();
    let there = there.as_deref().and_then(Path::parent);
    // A snapshot of the hub is `snapshots/HASH`, beside `blobs`.
    let cache = folder.as_deref().and_then(|it| it.parent()?.parent());
    let is_blob = there.is_some() && there == cache.map(|it| it.join("blobs")).as_deref();
    if there == folder.as_deref() || is_blob {
        return Ok(());
    }
    Err(
        "expected a file of the model, got a link to another folder; help: copy the file here if \
         it belongs to the model"
            .into(),
    )
}

/// The tokens of a tokenizer.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// The content of its file.
    pub file: Vec<u8>,
    /// The content of those of `CHAT_FILES` that are beside it.
    pub chat_files: BTreeMap<&'static str, Vec<u8>>,
    /// How many different tokens there are.
    pub size: usize,
    /// A hash of all tokens and their numbers.
    pub hash: String,
    /// The numbers of special tokens, such as the end of a document.
    special: BTreeMap<String, u32>,
}

#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
#[serde(rename = "Model")]
struct TokenizerModel {
    vocab: Vocab,
}

/// A number for each token; Unigram lists tokens with their scores instead.
#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    Numbers(BTreeMap<String, u32>),
    List(Vec<(String, f64)>),
}

impl Vocabulary {
    /// That of the tokenizer in the file at `path`.
    pub fn read(path: &Path) -> Result<Vocabulary> {
        if let Some(help) = path.parent().and_then(help_to_make_tokenizer)
            && !path.exists()
        {
            let what = format!("expected {TOKENIZER_FILE}, got none; help: {help}");
            return Err(refuse(path, what));
        }
        let bytes = read_up_to(path, BYTES_MAX).map_err(reading(path))?;
        let long = || {
            format!(
                "expected a tokenizer of at most {BYTES_MAX} bytes, got a longer file; help: give another"
            )
        };
        let read = bytes.ok_or_else(long).and_then(Vocabulary::of_bytes);
        let mut vocabulary = read.map_err(|why| refuse(path, why))?;
        for name in CHAT_FILES {
            let path = &path.with_file_name(name);
            if path.is_file() {
                check_link(path).map_err(|why| refuse(path, why))?;
                let bytes = read_up_to(path, CHAT_BYTES_MAX).map_err(reading(path))?;
                let long = || {
                    format!(
                        "expected at most {CHAT_BYTES_MAX} bytes, got a longer file; help: shorten or remove it"
                    )
                };
                let bytes = bytes.ok_or_else(|| refuse(path, long()))?;
                vocabulary.chat_files.insert(name, bytes);
            }
        }
        Ok(vocabulary)
    }

    /// The tokens at which `generation_config.json` says that a text ends.
    pub fn ends(&self) -> Vec<u32> {
        let file = self.chat_files.get(CHAT_FILES[2]);
        let read = file.and_then(|bytes| serde_json::from_slice::<Value>(bytes).ok());
        let ends = read.map(|json| json["eos_token_id"].clone());
        let ends = match ends {
            Some(Value::Array(all)) => all,
            one => one.into_iter().collect(),
        };
        let token = |end: &Value| u32::try_from(end.as_u64()?).ok();
        ends.iter().filter_map(token).collect()
    }

    /// All its files, by name.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        let others = self.chat_files.iter();
        let others = others.map(|(name, bytes)| (*name, &bytes[..]));
        std::iter::once((TOKENIZER_FILE, &self.file[..])).chain(others)
    }

    /// That of a tokenizer with this `tokenizer.json`.
    pub fn of_bytes(file: Vec<u8>) -> Result<Vocabulary, String> {
        let what = "expected a tokenizer.json of Hugging Face's tokenizers";
        let help =
            "help: save it with tokenizer.save(path), or save_pretrained of a fast tokenizer";
        let read: TokenizerJson =
            serde_json::from_slice(&file).map_err(|error| format!("{what}: {error}; {help}"))?;
        for (name, steps) in [("normalizer", &read.normalizer), ("decoder", &read.decoder)] {
            check_growth(steps).map_err(|why| format!("{name}: {why}"))?;
        }
        let mut tokens: Vec<(u32, String)> = match read.model.vocab {
            Vocab::Numbers(numbers) => numbers.into_iter().map(|(text, id)| (id, text)).collect(),
            Vocab::List(list) => (0..).zip(list.into_iter().map(|(text, _)| text)).collect(),
        };
        let added = read.added_tokens.iter();
        tokens.extend(added.map(|token| (token.id, token.content.clone())));
        tokens.sort_unstable();
        tokens.dedup();
        let size = tokens.last().map_or(0, |(id, _)| *id as usize + 1);
        ensure!(
            (1..=TOKENS_MAX).contains(&(size as u64)),
            "{what} with 1 to {TOKENS_MAX} tokens, got {size}; {help}"
        );
        let mut hash = XxHash3_128::new();
        for (id, text) in &tokens {
            hash.write(&id.to_le_bytes());
            hash.write(&(text.len() as u64).to_le_bytes());
            hash.write(text.as_bytes());
        }
        let special = read.added_tokens.into_iter().filter(|token| token.special);
        Ok(Vocabulary {
            file,
            chat_files: BTreeMap::new(),
            size,
            hash: format!("{:032x}", hash.finish_128()),
            special: special.map(|token| (token.content, token.id)).collect(),
        })
    }

    /// One in which the number of a token is that of its byte, and 256 ends a document.
    pub fn bytes() -> Vocabulary {
        Vocabulary::of_bytes(include_bytes!("bytes.json").into()).expect("it has 257 tokens")
    }

    /// The token after each document: `named`, else one that usually is.
    pub fn end_of_text(&self, named: Option<&str>) -> Result<u32> {
        let mut names = END_TOKENS.into_iter();
        let found = match named {
            Some(name) => self.special.get(name),
            None => names.find_map(|name| self.special.get(name)),
        };
        let Some(found) = found else {
            let all: Vec<_> = self.special.keys().map(String::as_str).collect();
            let expected = named.map_or(END_TOKENS.join(", "), |name| format!("{name:?}"));
            let help = if all.is_empty() {
                "add one to the tokenizer, or give another tokenizer".to_string()
            } else {
                format!("name one of these as {END_TOKEN}")
            };
            bail!(
                Usage,
                "{TOKENIZER}: expected a special token that ends documents ({expected}), got [{}]; help: {help}",
                all.join(", ")
            );
        };
        Ok(*found)
    }

    /// The text of a special token.
    pub fn special_text(&self, token: usize) -> Option<&str> {
        let mut all = self.special.iter();
        let found = all.find(|(_, id)| **id as usize == token);
        found.map(|(text, _)| text.as_str())
    }
}

/// Steps of a normalizer or a decoder, and how many times as long they may make a text: usual ones
/// have up to ten, and double it at most.
const TEXT_STEPS_MAX: usize = 100;
const GROWTH_MAX: f64 = 1000.0;

/// Refuses steps that could make a text so long that it is never done.
fn check_growth(steps: &Value) -> Result<(), String> {
    let (mut count, mut growth, mut left) = (0, 1.0, vec![steps]);
    while let Some(value) = left.pop() {
        let Value::Object(fields) = value else {
            left.extend(value.as_array().into_iter().flatten());
            continue;
        };
        let letters = |value: &Value| value.as_str().map_or(0, |text| text.chars().count()) as f64;
        let replaced = letters(&value["pattern"]["String"]);
        growth *= match letters(&value["content"]) {
            _ if value["pattern"].is_null() => 1.0,
            added if replaced > 0.0 => (added / replaced).max(1.0),
            // What a regex matches may be empty.
            added => 1.0 + added,
        };
        growth *= 1.0 + letters(&value["prepend"]);
        count += 1;
        left.extend(fields.values().filter(|value| value.is_array()));
    }
    ensure!(
        count <= TEXT_STEPS_MAX && growth <= GROWTH_MAX,
        "expected at most {TEXT_STEPS_MAX} steps that make a text at most {GROWTH_MAX} times as long, got {count} steps \
         and {growth:.0} times; help: give another tokenizer"
    );
    Ok(())
}

/// Bytes on either side of a cut that decide whether it changes tokens.
const AROUND_CUT: usize = 256;
/// Whitespace in a row that is refused. The regexes of the crate `tokenizers` give up at a million
/// states, one or two for each character, and the rest of the text would be one word.
const GAP_MAX: usize = 500_000;

/// Turns text into tokens. Each thread has its own, since it may cache words.
#[derive(Clone, Debug)]
pub enum Encoder {
    /// Each byte is a token.
    Bytes,
    /// As `tokenizer.json` says.
    #[cfg(feature = "tokenizers")]
    Tokenizer {
        /// Without its post-processor, which only adds `begin` and cuts spaces off places.
        tokenizer: Box<tokenizers::Tokenizer>,
        /// What it puts before every text, such as the token that begins documents.
        begin: Vec<u32>,
    },
}

/// The tokens of a text, and which of its bytes each was made from.
pub(crate) type PlacedTokens = (Vec<u32>, Vec<(usize, usize)>);

impl Encoder {
    /// The tokens of a text. An error says what is wrong with the text or the tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match self {
            Encoder::Bytes => Ok(bytes(text)),
            #[cfg(feature = "tokenizers")]
            Encoder::Tokenizer { tokenizer, .. } => built::encode(tokenizer, text),
        }
    }

    /// The same with the place of each token.
    #[cfg_attr(not(feature = "tokenizers"), expect(unused_variables))]
    pub(crate) fn encode_placed(&self, text: &str) -> Result<PlacedTokens, String> {
        match self {
            Encoder::Bytes => Err("expected a tokenizer.json, got bytes".into()),
            #[cfg(feature = "tokenizers")]
            Encoder::Tokenizer { tokenizer, .. } => built::encode_placed(tokenizer, text),
        }
    }

    /// The tokens that the tokenizer puts before every text.
    pub(crate) fn begin(&self) -> &[u32] {
        match self {
            Encoder::Bytes => &[],
            #[cfg(feature = "tokenizers")]
            Encoder::Tokenizer { begin, .. } => begin,
        }
    }

    /// The text of one token, also of a special one.
    pub fn text_of(&self, token: u32) -> Result<String, String> {
        match self {
            Encoder::Bytes => self.decode(&[token]),
            #[cfg(feature = "tokenizers")]
            Encoder::Tokenizer { tokenizer, .. } => built::decode(tokenizer, &[token], false),
        }
    }

    /// The text of tokens, without special ones. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        match self {
            Encoder::Bytes => {
                let bytes = tokens.iter().filter_map(|token| u8::try_from(*token).ok());
                let bytes: Vec<u8> = bytes.collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            #[cfg(feature = "tokenizers")]
            Encoder::Tokenizer { tokenizer, .. } => built::decode(tokenizer, tokens, true),
        }
    }

    /// Whether `text` gives the same tokens if it is split at `at`, judging by the text around it.
    pub(crate) fn may_cut(&self, text: &str, at: usize) -> bool {
        let start = text.floor_char_boundary(at.saturating_sub(AROUND_CUT));
        let end = text.ceil_char_boundary((at + AROUND_CUT).min(text.len()));
        let tokens = |from: usize, to: usize| self.encode(&text[from..to]);
        match (tokens(start, end), tokens(start, at), tokens(at, end)) {
            (Ok(whole), Ok(before), Ok(after)) => whole == [before, after].concat(),
            _ => false,
        }
    }
}

/// Refuses a text with so much whitespace in a row.
pub(super) fn check_gaps(text: &str) -> Result<(), String> {
    let mut gaps = text.split(|character: char| !character.is_whitespace());
    ensure!(
        text.len() < GAP_MAX || gaps.all(|gap| gap.len() < GAP_MAX),
        "expected fewer than {GAP_MAX} bytes of whitespace in a row, where tokenizers give up; help: shorten them"
    );
    Ok(())
}

/// One token for each byte. The text of the end-of-document token becomes that token.
fn bytes(text: &str) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(text.len());
    for (number, part) in text.split(END).enumerate() {
        tokens.extend((number > 0).then_some(256));
        tokens.extend(part.bytes().map(u32::from));
    }
    tokens
}

#[cfg(feature = "tokenizers")]
pub(super) use built::learn;
#[cfg(not(feature = "tokenizers"))]
pub(super) use not_built::learn;

#[cfg(feature = "tokenizers")]
mod built {
    use ddp_kernels::panics;
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{AddedToken, PostProcessorWrapper, Tokenizer};

    use super::{END, Encoder, PlacedTokens, Vocabulary, check_gaps};

    impl Encoder {
        /// That of a `tokenizer.json`.
        pub fn of(vocabulary: &Vocabulary) -> Result<Encoder, String> {
            let read = guarded(|| {
                let mut tokenizer = Tokenizer::from_bytes(&vocabulary.file)?;
                // Documents are taken whole.
                tokenizer.with_truncation(None)?.with_padding(None);
                let begin = tokenizer.encode_fast("", true)?.get_ids().to_vec();
                tokenizer.with_post_processor(None::<PostProcessorWrapper>);
                let tokenizer = Box::new(tokenizer);
                Ok(Encoder::Tokenizer { tokenizer, begin })
            });
            read.map_err(|error| format!("expected a tokenizer.json: {error}"))
        }
    }

    pub(super) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, String> {
        check_gaps(text)?;
        let encoded = guarded(|| Ok(tokenizer.encode_fast(text, false)?.get_ids().to_vec()));
        encoded.map_err(|error| format!("the tokenizer: {error}"))
    }

    pub(super) fn encode_placed(tokenizer: &Tokenizer, text: &str) -> Result<PlacedTokens, String> {
        check_gaps(text)?;
        let encoded = guarded(|| tokenizer.encode(text, false));
        let encoded = encoded.map_err(|error| format!("the tokenizer: {error}"))?;
        Ok((encoded.get_ids().to_vec(), encoded.get_offsets().to_vec()))
    }

    pub(super) fn decode(
        tokenizer: &Tokenizer,
        tokens: &[u32],
        skips_special: bool,
    ) -> Result<String, String> {
        let text = guarded(|| tokenizer.decode(tokens, skips_special));
        text.map_err(|error| format!("the tokenizer: {error}"))
    }

    /// The crate's work, which may panic.
    fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
        let done = panics::caught(work).unwrap_or_else(|| Err("it gave up".into()));
        done.map_err(|error| error.to_string())
    }

    /// The `tokenizer.json` of a byte-level BPE with `size` tokens, learned from these texts.
    pub(in super::super) fn learn(
        texts: impl Iterator<Item = String> + Send,
        size: usize,
    ) -> Result<Vec<u8>, String> {
        let trainer = BpeTrainer::builder()
            .vocab_size(size)
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from(END, true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let mut trainer = TrainerWrapper::from(trainer);
        let mut tokenizer = Tokenizer::new(BPE::default());
        let byte_level = ByteLevel::new(false, true, true);
        tokenizer.with_pre_tokenizer(Some(byte_level));
        tokenizer.with_decoder(Some(byte_level));
        // A text may say itself where documents end.
        let parts = |text: String| text.split(END).map(String::from).collect::<Vec<_>>();
        guarded(|| {
            tokenizer.train(&mut trainer, texts.flat_map(parts))?;
            Ok(tokenizer.to_string(true)?.into_bytes())
        })
    }
}

#[cfg(not(feature = "tokenizers"))]
mod not_built {
    use super::{Encoder, Vocabulary};

    pub(crate) const WHY: &str = "this program was built without tokenizers; help: build it with `cargo build \
         --release -p ddp --features tokenizers`";

    impl Encoder {
        /// That of a `tokenizer.json`.
        pub fn of(_: &Vocabulary) -> Result<Encoder, String> {
            Err(WHY.into())
        }
    }

    pub(in super::super) fn learn(
        _: impl Iterator<Item = String> + Send,
        _: usize,
    ) -> Result<Vec<u8>, String> {
        Err(WHY.into())
    }
}

/// Replaces bytes that are not UTF-8. It is also the end of a text that ends within a character.
const REPLACED: char = '\u{fffd}';
/// Tokens before a new one that its text may depend on, as the space before a word does.
const AROUND: usize = 8;

/// Turns tokens into text that is made as a stream.
#[derive(Debug)]
pub struct TextStream<'a> {
    encoder: &'a Encoder,
    /// The tokens whose text is not given out yet, and some before them.
    tokens: Vec<u32>,
    /// How many of them are before.
    before: usize,
}

impl<'a> TextStream<'a> {
    /// The text after these tokens.
    pub fn after(encoder: &'a Encoder, tokens: &[u32]) -> TextStream<'a> {
        let tokens = tokens[tokens.len().saturating_sub(AROUND)..].to_vec();
        TextStream {
            encoder,
            before: tokens.len(),
            tokens,
        }
    }

    /// The text that is known with one more token: empty in the middle of a character.
    pub fn push(&mut self, token: u32) -> Result<String, String> {
        self.tokens.push(token);
        let text = self.text()?;
        if text.ends_with(REPLACED) {
            return Ok(String::new());
        }
        if !text.is_empty() {
            self.tokens
                .drain(..self.tokens.len().saturating_sub(AROUND));
            self.before = self.tokens.len();
        }
        Ok(text)
    }

    /// The rest of the text. What is not a character is replaced.
    pub fn finish(self) -> Result<String, String> {
        self.text()
    }

    /// The text of the new tokens.
    fn text(&self) -> Result<String, String> {
        let before = self.encoder.decode(&self.tokens[..self.before])?;
        let whole = self.encoder.decode(&self.tokens)?;
        // A decoder may change what is before, as the space before a full stop.
        let start = whole.floor_char_boundary(before.len());
        Ok(whole[start..].to_string())
    }
}
