//! From texts to shards of tokens, and back: `documents` reads files, `tokenizer` turns text into
//! tokens, and `tokenize` fills a `folder` with shards, some for training and some of held-out
//! documents.
//!
//! ```text
//! OUT/tokens-000000.bin …       shards, as `data` reads them
//! OUT/val/tokens-000000.bin …   documents that are held out
//! OUT/tokenizer.json
//! ```
//!
//! The folder is written under the name `.OUT.unfinished` and renamed when it is complete. Each
//! shard contains a hash of its texts and of the vocabulary. So a restarted run reads the texts
//! again, but does not tokenize those of finished shards.

pub(crate) mod documents;
mod folder;
pub(crate) mod tokenizer;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use ddp_kernels::files as disk;
use twox_hash::{XxHash3_64, XxHash3_128};

pub use self::documents::{ReadOptions, ReadTexts, TextPiece, TextSink, documents};
use self::folder::Folder;
pub use self::folder::Side;
pub(crate) use self::folder::check_whole;
pub use self::tokenizer::{
    CHAT_FILES, Encoder, TOKENIZER_FILE, TextStream, Vocabulary, check_link, help_to_make_tokenizer,
};
use crate::error::{Error, Result, ensure};
use crate::files::io::reading;
use crate::files::tokens::write_shard;
use crate::files::{flat, open_tokens};
use crate::scan::in_segments;
use crate::setting::{TOKENIZER, VAL_SPLIT};

/// Part of every shard's hash: those of another version are made again.
const VERSION: &[u8] = b"ddp texts 1";

/// What is tokenized, and how.
#[derive(Clone, Debug)]
pub struct TokenizeOptions {
    /// Files of text, in this order.
    pub files: Vec<PathBuf>,
    /// The tokenizer.
    pub tokenizer: TokenizerChoice,
    /// The token after each document, if not one that usually is.
    pub end_token: Option<String>,
    /// The field or column of a text.
    pub field: String,
    /// Whether bytes that are not UTF-8 are replaced.
    pub lossy: bool,
    /// The share of documents that is held out.
    pub val_split: f64,
    /// The folder of the shards.
    pub out: PathBuf,
    /// How texts are divided.
    pub sizes: ShardSizes,
    /// The reader of `.parquet`, if the program has one.
    pub columns: Option<ReadTexts>,
}

/// How texts are divided.
#[derive(Clone, Copy, Debug)]
pub struct ShardSizes {
    /// A long text is cut into pieces of about this size.
    pub piece_bytes: usize,
    /// A shard ends with the piece that makes its text this long.
    pub(crate) shard_bytes: usize,
}

impl Default for ShardSizes {
    fn default() -> ShardSizes {
        ShardSizes {
            piece_bytes: 1 << 20,
            shard_bytes: 128 << 20,
        }
    }
}

/// A tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// Each byte is a token.
    Bytes,
    /// That of a `tokenizer.json`.
    File(PathBuf),
    /// A byte-level BPE of this many tokens, learned from the texts.
    Learned(usize),
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub struct TokenizeProgress {
    /// Whether the vocabulary is being learned.
    pub is_learning: bool,
    /// Bytes of files that were read.
    pub read_bytes: u64,
    /// Of this many.
    pub file_bytes: u64,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokenized {
    /// Documents to train on, and those held out.
    pub sides: [Side; 2],
    /// Documents without text, which were skipped.
    pub empty_documents: u64,
    /// Shards that were there already.
    pub known_shards: usize,
    /// Bytes of text that were tokenized, without those of shards that were there.
    pub text_bytes: u64,
    /// How many different tokens there are.
    pub vocabulary: usize,
}

/// Texts that become a shard.
#[derive(Default)]
struct ShardTexts {
    side: usize,
    number: usize,
    pieces: Vec<TextPiece>,
    bytes: usize,
    documents: u64,
}

/// What is told how far it is.
type Report<'a> = &'a mut (dyn FnMut(TokenizeProgress) + Send);

/// Tokenizes files into a folder, on all threads.
pub fn tokenize(options: &TokenizeOptions, progress: Report<'_>) -> Result<Tokenized> {
    let folder = Folder::open(&options.out)?;
    let done = fill(options, &folder, progress);
    if done.is_err() {
        folder.leave();
    }
    let done = done?;
    folder.finish()?;
    Ok(done)
}

fn fill(options: &TokenizeOptions, folder: &Folder, progress: Report<'_>) -> Result<Tokenized> {
    // All are looked at before any is read.
    let bytes_of = |path: &PathBuf| Ok(fs::metadata(path).map_err(reading(path))?.len());
    let file_bytes = options.files.iter().map(bytes_of).sum::<Result<u64>>()?;
    let mut report = |is_learning, read_bytes: &AtomicU64| {
        progress(TokenizeProgress {
            is_learning,
            read_bytes: read_bytes.load(Ordering::Relaxed),
            file_bytes,
        });
    };
    let vocabulary = match &options.tokenizer {
        TokenizerChoice::Bytes => Vocabulary::bytes(),
        TokenizerChoice::File(path) => Vocabulary::read(&if path.is_dir() {
            path.join(TOKENIZER_FILE)
        } else {
            path.clone()
        })?,
        TokenizerChoice::Learned(size) => {
            learned(options, *size, &mut |bytes| report(true, bytes))?
        }
    };
    let encoder = match &options.tokenizer {
        TokenizerChoice::Bytes => Encoder::Bytes,
        _ => Encoder::of(&vocabulary).map_err(|why| bad_tokenizer(options, why))?,
    };
    let mut work = ShardMaker {
        folder,
        end: vocabulary.end_of_text(options.end_token.as_deref())?,
        vocabulary: &vocabulary,
        encoder: &encoder,
        done: Tokenized {
            vocabulary: vocabulary.size,
            ..Tokenized::default()
        },
    };
    let read_bytes = AtomicU64::new(0);
    let read_options = options.read(Some(&encoder), &read_bytes);
    thread::scope(|scope| {
        // One group is read while another is tokenized.
        let (sender, groups) = mpsc::sync_channel(1);
        let reader = scope.spawn(|| read_groups(options, &read_options, sender));
        for group in groups {
            work.shard(&group)?;
            report(false, &read_bytes);
        }
        work.done.empty_documents = reader.join().map_err(|_| ended())??;
        Ok::<_, Error>(())
    })?;
    let done = work.done;
    check_sides(options, &done)?;
    folder.put(0, TOKENIZER_FILE, &vocabulary.file)?;
    folder.check_shards(done.sides.map(|side| side.shards))?;
    folder.put_contents(&done.sides)?;
    Ok(done)
}

impl TokenizeOptions {
    /// How its files are read.
    fn read<'a>(
        &'a self,
        encoder: Option<&'a Encoder>,
        read_bytes: &'a AtomicU64,
    ) -> ReadOptions<'a> {
        ReadOptions {
            field: &self.field,
            lossy: self.lossy,
            encoder,
            piece_bytes: self.sizes.piece_bytes,
            read_bytes,
            columns: self.columns,
        }
    }
}

fn ended() -> Error {
    Error::Internal("a thread that tokenizes has ended".into())
}

fn bad_tokenizer(options: &TokenizeOptions, why: String) -> Error {
    let what = match &options.tokenizer {
        TokenizerChoice::File(path) => path.display().to_string(),
        TokenizerChoice::Bytes => "bytes".into(),
        TokenizerChoice::Learned(_) => "the learned one".into(),
    };
    Error::Data(format!("{TOKENIZER} {what}: {why}; help: give another"))
}

/// Learns a vocabulary of `size` tokens from all texts, also from those that are held out.
fn learned(
    options: &TokenizeOptions,
    size: usize,
    report: &mut (dyn FnMut(&AtomicU64) + Send),
) -> Result<Vocabulary> {
    let read_bytes = AtomicU64::new(0);
    let read_options = &options.read(None, &read_bytes);
    let (sender, texts) = mpsc::sync_channel(16);
    let file = thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut send = |piece: TextPiece| {
                report(read_options.read_bytes);
                tokenizer::check_gaps(&piece.text).map_err(Error::Data)?;
                let gone = |_| Error::Internal("the vocabulary could not be learned".into());
                sender.send(piece.text).map_err(gone)
            };
            let mut files = options.files.iter();
            files.try_for_each(|path| documents(path, read_options, &mut send))
        });
        let file = tokenizer::learn(texts.into_iter(), size);
        let file = file.map_err(|why| bad_tokenizer(options, why))?;
        reader.join().map_err(|_| ended())??;
        Ok::<_, Error>(file)
    })?;
    let learned = Vocabulary::of_bytes(file).map_err(|why| bad_tokenizer(options, why))?;
    if learned.size < size {
        tracing::warn!(
            "the vocabulary has {} tokens, not {size}: no other pair of tokens occurs twice",
            learned.size
        );
    }
    Ok(learned)
}

/// Reads all files into groups. Returns how many documents have no text.
fn read_groups(
    options: &TokenizeOptions,
    read_options: &ReadOptions<'_>,
    groups: SyncSender<ShardTexts>,
) -> Result<u64> {
    let new = |side, number| ShardTexts {
        side,
        number,
        ..ShardTexts::default()
    };
    let mut open = [new(0, 0), new(1, 0)];
    let (mut document, mut empty) = (0, 0);
    // The receiver is gone after an error, which it reports.
    let gone = |_| Error::Internal("the shards could not be written".into());
    for path in &options.files {
        let mut has_text = false;
        documents(path, read_options, &mut |piece| {
            let (ends, is_empty) = (piece.ends_document, piece.text.is_empty());
            if is_empty && !has_text {
                empty += 1;
                return Ok(());
            }
            let side = usize::from(is_held_out(document, options.val_split));
            let group = &mut open[side];
            group.bytes += piece.text.len();
            group.pieces.push(piece);
            has_text = !ends;
            group.documents += u64::from(ends);
            document += u64::from(ends);
            if group.bytes < options.sizes.shard_bytes {
                return Ok(());
            }
            let next = new(side, group.number + 1);
            groups.send(std::mem::replace(group, next)).map_err(gone)
        })?;
    }
    let rest = open.into_iter().filter(|group| !group.pieces.is_empty());
    rest.into_iter()
        .try_for_each(|group| groups.send(group).map_err(gone))?;
    Ok(empty)
}

/// Whether a document is held out: one in 1 / `share` documents that follow each other, at random.
fn is_held_out(document: u64, share: f64) -> bool {
    let share_of = |count: u64| (count as f64 * share) as u64;
    let is_at = |stratum: u64| {
        let random = XxHash3_64::oneshot(&stratum.to_le_bytes()) as f64 / 2f64.powi(64);
        ((stratum as f64 + random) / share) as u64 == document
    };
    share > 0.0 && (share_of(document)..=share_of(document + 1)).any(is_at)
}

/// Refuses a split that leaves one side without documents.
fn check_sides(options: &TokenizeOptions, done: &Tokenized) -> Result<()> {
    let [train, val] = done.sides;
    ensure!(
        train.documents + val.documents > 0,
        "expected text, got {} documents without any; help: give other files",
        done.empty_documents
    );
    ensure!(
        options.val_split == 0.0 || (train.documents > 0 && val.documents > 0),
        "{VAL_SPLIT} {}: expected documents on both sides, got {} to train on and {} held out; \
         help: leave it out, and hold out the end of the tokens by {VAL_SPLIT} in training",
        options.val_split,
        train.documents,
        val.documents
    );
    Ok(())
}

struct ShardMaker<'a> {
    folder: &'a Folder,
    vocabulary: &'a Vocabulary,
    end: u32,
    encoder: &'a Encoder,
    done: Tokenized,
}

impl ShardMaker<'_> {
    /// Makes the shard of a group, unless it is there.
    fn shard(&mut self, group: &ShardTexts) -> Result<()> {
        let path = self.folder.shard(group.side, group.number);
        let source = self.source(group);
        let count = match tokens_of(&path, &source) {
            Some(count) => {
                self.done.known_shards += 1;
                count
            }
            None => {
                self.done.text_bytes += group.bytes as u64;
                self.write(group, &path, source)?
            }
        };
        let side = &mut self.done.sides[group.side];
        side.documents += group.documents;
        side.tokens += count;
        side.shards += 1;
        Ok(())
    }

    /// What a shard says about its source: a hash of these texts and of the vocabulary.
    fn source(&self, group: &ShardTexts) -> String {
        let mut hash = XxHash3_128::new();
        hash.write(VERSION);
        // Normalizers and merges too, not only the tokens.
        hash.write(&self.vocabulary.file);
        hash.write(&self.end.to_le_bytes());
        for piece in &group.pieces {
            hash.write(&(piece.text.len() as u64).to_le_bytes());
            hash.write(piece.text.as_bytes());
            hash.write(&[u8::from(piece.ends_document)]);
        }
        format!("texts {:032x}", hash.finish_128())
    }

    fn write(&self, group: &ShardTexts, path: &Path, source: String) -> Result<u64> {
        self.folder.check_may_change()?;
        let encode = |index: u64| {
            let piece = &group.pieces[index as usize];
            let mut tokens = self.encoder.encode(&piece.text).map_err(Error::Data)?;
            tokens.extend(piece.ends_document.then_some(self.end));
            Ok(tokens)
        };
        let tokens = in_segments(0..group.pieces.len() as u64, encode)?;
        disk::make_folder(&self.folder.side(group.side))?;
        let about = flat::About {
            vocabulary: Some(self.vocabulary.size),
            end_of_text: Some(self.end as usize),
            tokenizer: Some(self.vocabulary.hash.clone()),
            source: Some(source),
            ..flat::About::default()
        };
        write_shard(path, about, &tokens)?;
        Ok(tokens.iter().map(|tokens| tokens.len() as u64).sum())
    }
}

/// The number of tokens in the shard at `path`, if it is whole and made of these texts.
fn tokens_of(path: &Path, source: &str) -> Option<u64> {
    let found = flat::open(path, "").ok()?.about.source?;
    if found != source || flat::verify(path).is_err() {
        return None;
    }
    let shard = open_tokens(path, None, None).ok()?;
    Some(shard.tokens.rows())
}

#[cfg(test)]
mod tests;
