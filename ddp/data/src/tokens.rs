//! Files of tokens as rows: windows of context + 1 tokens, one every `context` tokens. A window's
//! first tokens are its inputs, and the targets are the same window shifted by one, so every token
//! but the first of a file is a target once an epoch.
//!
//! Windows do not cross files, as in llm.c: files of a folder may be split anywhere, so only tokens
//! of one file are known to follow each other. Tokens left at the end of a file are not used.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::setting::SettingName;
use ddp_kernels::{DType, Tensor};

use crate::dataset::{Dataset, RowSpec, check_gather, content_blake3, each_row};
use crate::error::{Result, bail, ensure};
use crate::file_rows::ChangeWatch;
use crate::files::{Array, Coding, TokenFile, open_tokens};
use crate::resolve;
use crate::spec::TokensSpec;
use crate::task::{TaskSpec, TensorSpec};
use crate::text::{TOKENIZER_FILE, Vocabulary, check_whole};

/// The task that tokens are for, if it is known before they are read, and where it is from, for
/// messages.
pub(crate) type Known<'a> = Option<(&'a TaskSpec, &'a str)>;

/// Open files of tokens of one kind.
#[derive(Debug)]
pub(crate) struct TokenFiles {
    pub(crate) arrays: Vec<Array>,
    pub(crate) coding: Coding,
    /// What the tokens are, for people.
    pub(crate) kind: String,
}

impl TokenFiles {
    /// Opens all files of `spec`; only headers are read. `setting` is where they were given.
    pub(crate) fn open(
        spec: &TokensSpec,
        setting: SettingName<'_>,
        cache_dir: Option<&Path>,
    ) -> Result<TokenFiles> {
        let paths = resolve::files(&spec.path, setting)?;
        let open = |path| open_tokens(path, spec.token_type, cache_dir);
        let files = paths.iter().map(|path| open(path));
        let files: Vec<TokenFile> = files.collect::<Result<_>>()?;
        let (first, kind) = (&files[0], files[0].describe());
        let differs = |file: &&TokenFile| {
            file.coding != first.coding || file.tokens.element != first.tokens.element
        };
        if let Some(other) = files.iter().find(differs) {
            bail!(
                "{}: expected {kind}, as in {}, got {}; help: give files of one tokenizer and format",
                other.tokens.name(),
                first.tokens.name(),
                other.describe()
            );
        }
        let coding = first.coding.clone();
        let arrays: Vec<Array> = files.into_iter().map(|file| file.tokens).collect();
        check_whole(Path::new(&spec.path), arrays.iter().map(Array::rows).sum())?;
        Ok(TokenFiles {
            arrays,
            coding,
            kind,
        })
    }

    /// An error if these tokens are not those of the task that is known.
    pub(crate) fn check(&self, known: Known<'_>) -> Result<()> {
        let Some((
            TaskSpec::NextToken {
                are_bytes,
                tokenizer,
                ..
            },
            owner,
        )) = known
        else {
            return Ok(());
        };
        let (coding, place) = (&self.coding, self.arrays[0].name());
        let both = tokenizer.as_ref().zip(coding.tokenizer.as_ref());
        let [bytes, tokens] = ["bytes of a text", "tokens of a tokenizer"];
        let (expected, got) = match (are_bytes, coding.are_bytes) {
            (true, false) => (format!("{bytes}, as {owner} has"), tokens),
            (false, true) => (format!("{tokens}, as {owner} has"), bytes),
            _ if both.is_some_and(|(expected, got)| expected.hash != *got) => (
                format!("tokens of the tokenizer of {owner}"),
                "tokens of another",
            ),
            _ => return Ok(()),
        };
        bail!(
            "{place}: expected {expected}, got {got}; help: give the text itself to a model of bytes, else make \
             tokens of it with the tokenizer.json that the model has"
        )
    }

    /// The tokenizer of these tokens, if the files name it and it is beside them.
    pub(crate) fn tokenizer(&self) -> Result<Option<Vocabulary>> {
        let first = &self.arrays[0];
        let path = first.mapped.path().with_file_name(TOKENIZER_FILE);
        let Some(hash) = self.coding.tokenizer.as_ref().filter(|_| path.exists()) else {
            return Ok(None);
        };
        let found = Vocabulary::read(&path)?;
        ensure!(
            found.hash == *hash,
            "{}: expected the tokenizer of {}, got another; help: put that one back, or tokenize the texts with this one",
            path.display(),
            first.name()
        );
        Ok(Some(found))
    }

    /// The first window of each file, then the number of all windows.
    pub(crate) fn windows(&self, context: usize) -> Result<Vec<u64>> {
        let mut firsts = vec![0];
        for array in &self.arrays {
            let windows = (array.rows() - 1) / context as u64;
            ensure!(
                windows > 0,
                "{}: expected at least {} tokens, one more than the context, got {}; help: give a smaller context, or \
                 leave this file out",
                array.name(),
                context + 1,
                array.rows()
            );
            firsts.push(firsts[firsts.len() - 1] + windows);
        }
        Ok(firsts)
    }
}

/// Windows of tokens.
#[derive(Clone, Debug)]
pub(crate) struct TokenWindows {
    pub(crate) files: Arc<TokenFiles>,
    /// As `TokenFiles::windows` returns it.
    firsts: Arc<[u64]>,
    /// Which of all windows these are.
    pub(crate) range: Range<u64>,
    spec: RowSpec,
    /// A hash of all tokens, and its BLAKE3.
    content: (u64, String),
    watch: Arc<ChangeWatch>,
}

impl TokenWindows {
    /// The windows `range` of files with this content.
    pub(crate) fn new(
        files: Arc<TokenFiles>,
        content: (u64, String),
        context: usize,
        range: Range<u64>,
        task: TaskSpec,
    ) -> Result<TokenWindows> {
        let watched = files.arrays.iter().map(|array| array.mapped.clone());
        Ok(TokenWindows {
            firsts: files.windows(context)?.into(),
            spec: RowSpec {
                inputs: TensorSpec::new(DType::I64, &[context]),
                targets: TensorSpec::new(DType::I64, &[context]),
                task,
                image: Vec::new(),
            },
            range,
            content,
            watch: Arc::new(ChangeWatch::over(watched.collect())),
            files,
        })
    }

    /// Reads a window: `inputs` and `targets` (context).
    fn read(&self, row: u64, inputs: &mut [i64], targets: &mut [i64]) -> Result<()> {
        let (window, context) = (self.range.start + row, inputs.len());
        let file = self.firsts.partition_point(|&first| first <= window) - 1;
        let array = &self.files.arrays[file];
        let first = (window - self.firsts[file]) * context as u64;
        array.read_i64(first, inputs)?;
        let (shifted, last) = targets.split_at_mut(context - 1);
        shifted.copy_from_slice(&inputs[1..]);
        array.read_i64(first + context as u64, last)?;
        // Tokens were checked at start-up; a model must never see one that it has no row for.
        let vocabulary = self.spec.task.outputs();
        let is_bad = |token: &i64| !(0..vocabulary as i64).contains(token);
        if let Some(index) = inputs.iter().chain(&*last).position(is_bad) {
            bail!(
                "{}, token {}: expected a token below {vocabulary}, as at the start: the file has changed since the start",
                array.name(),
                first + index as u64,
            );
        }
        Ok(())
    }
}

impl Dataset for TokenWindows {
    fn rows(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    /// Identifies the tokens, not their files: the same tokens in files of another format are the
    /// same data, if they are divided into files at the same places.
    fn fingerprint(&self) -> Result<String> {
        Ok(format!(
            "windows {:?} of {} of {} tokens, {}, content {:016x}",
            self.range,
            self.firsts[self.files.arrays.len()],
            self.spec.inputs.elements(),
            self.spec.task,
            self.content.0
        ))
    }

    fn blake3(&self) -> Result<String> {
        content_blake3(self, &self.content.1)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.watch.check_all()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        self.watch.check()?;
        each_row(rows, inputs, targets, |row, inputs, targets| {
            self.read(row, inputs, targets)
        })
    }
}
