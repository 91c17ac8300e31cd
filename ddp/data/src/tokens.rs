//! Tokens of files as rows: windows of context + 1 tokens, one every `context` tokens. A window's
//! first tokens are its inputs, and the targets are the same window shifted by one, so every token
//! but the first of a file is a target once an epoch.
//!
//! Windows do not cross files, as in llm.c: files of a folder may be cut anywhere, and each ends
//! with a window whose tokens follow each other. What is left at the end of a file is not trained
//! on; `TokenFiles::dropped` says how much.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::{DType, Tensor};

use crate::dataset::{Dataset, RowSpec, check_gather};
use crate::error::{Error, Result};
use crate::file_rows::ChangeWatch;
use crate::files::tokens::{self, Coding};
use crate::files::{Array, Element};
use crate::resolve;
use crate::spec::TokensSpec;
use crate::task::TaskSpec;
use crate::tensor_spec::TensorSpec;
use crate::text::{TOKENIZER_FILE, Vocabulary, check_whole};

/// Open files of tokens of one kind.
#[derive(Debug)]
pub(crate) struct TokenFiles {
    pub(crate) arrays: Vec<Array>,
    pub(crate) coding: Coding,
    /// Of the first file.
    folder: PathBuf,
}

impl TokenFiles {
    /// Opens all files of `path`; only headers are read. With a `spec` they hold tokens though they
    /// may not say so themselves. `setting` is where they were given.
    pub(crate) fn open(
        path: &str,
        spec: Option<&TokensSpec>,
        setting: &str,
        cache_dir: Option<&Path>,
    ) -> Result<TokenFiles> {
        let mut all: Option<TokenFiles> = None;
        let given = Path::new(path);
        for path in resolve::files(path, setting)? {
            let (array, coding) = tokens::open(&path, spec, cache_dir)?;
            let (stated, got) = (spec.and_then(|spec| spec.token_type), array.element());
            if stated.is_some_and(|stated| stated != got) {
                return Err(Error::Data(format!(
                    "{}: expected tokens without a header, whose type type= states, got {got}; help: leave out type=",
                    array.name()
                )));
            }
            match &mut all {
                None => {
                    let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
                    all = Some(TokenFiles {
                        arrays: vec![array],
                        coding,
                        folder,
                    });
                }
                Some(all) => all.add(array, coding)?,
            }
        }
        let all = all.ok_or_else(|| Error::Internal("a choice of no files".into()))?;
        check_whole(given, all.arrays.iter().map(Array::rows).sum())?;
        Ok(all)
    }

    fn add(&mut self, array: Array, coding: Coding) -> Result<()> {
        let first = &self.arrays[0];
        let kinds = [(first.element(), &self.coding), (array.element(), &coding)];
        if kinds[0] == kinds[1] {
            self.arrays.push(array);
            return Ok(());
        }
        let [expected, got] = kinds.map(|(element, coding)| describe(element, coding));
        Err(Error::Data(format!(
            "{}: expected {expected}, as in {}, got {got}; help: give files of one tokenizer and format",
            array.name(),
            first.name()
        )))
    }

    /// What made these tokens, if the files name it and it is beside them.
    pub(crate) fn tokenizer(&self) -> Result<Option<Vocabulary>> {
        let path = self.folder.join(TOKENIZER_FILE);
        let Some(hash) = self.coding.tokenizer.as_ref().filter(|_| path.exists()) else {
            return Ok(None);
        };
        let found = Vocabulary::read(&path)?;
        match found.hash == *hash {
            true => Ok(Some(found)),
            false => Err(Error::Data(format!(
                "{}: expected the tokenizer of {}, got another; help: put that one back, or tokenize the texts with this one",
                path.display(),
                self.arrays[0].name()
            ))),
        }
    }

    /// What the tokens are, for people.
    pub(crate) fn describe(&self) -> String {
        let marks = match self.marks() {
            0 => String::new(),
            marks => format!(", byte-order marks dropped: {marks}"),
        };
        describe(self.arrays[0].element(), &self.coding) + &marks
    }

    /// The first window of each file, then the number of all windows.
    pub(crate) fn windows(&self, context: usize) -> Result<Vec<u64>> {
        let mut firsts = vec![0];
        for array in &self.arrays {
            let windows = (array.rows() - 1) / context as u64;
            if windows == 0 {
                return Err(Error::Data(format!(
                    "{}: expected at least {} tokens, one more than the context, got {}; help: give a smaller context, or \
                     leave this file out",
                    array.name(),
                    context + 1,
                    array.rows()
                )));
            }
            firsts.push(firsts[firsts.len() - 1] + windows);
        }
        Ok(firsts)
    }

    /// How many texts begin with a byte-order mark, which is no token.
    fn marks(&self) -> usize {
        let has_mark = |array: &&Array| array.rows() < array.mapped().len();
        match self.coding.are_bytes {
            true => self.arrays.iter().filter(has_mark).count(),
            false => 0,
        }
    }

    /// How many tokens at the ends of files are in no window.
    pub(crate) fn dropped(&self, context: usize) -> u64 {
        let left = |array: &Array| (array.rows() - 1) % context as u64;
        self.arrays.iter().map(left).sum()
    }
}

fn describe(element: Element, coding: &Coding) -> String {
    let Coding {
        format,
        vocabulary,
        end_of_text,
        ..
    } = coding;
    let vocabulary = vocabulary.map_or(String::new(), |count| format!(", vocabulary {count}"));
    let end = end_of_text.map_or(String::new(), |token| {
        format!(", documents end with {token}")
    });
    format!("{format} ({element}{vocabulary}{end})")
}

/// Windows of tokens.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    pub(crate) files: Arc<TokenFiles>,
    /// As `TokenFiles::windows` returns it.
    pub(crate) firsts: Arc<[u64]>,
    /// Which of all windows these are.
    pub(crate) range: Range<u64>,
    pub(crate) spec: RowSpec,
    /// A hash of all tokens.
    pub(crate) content: u64,
    pub(crate) watch: Arc<ChangeWatch>,
}

impl Windows {
    /// What a window of so many tokens has.
    pub(crate) fn row_spec(context: usize, task: TaskSpec) -> RowSpec {
        RowSpec {
            inputs: TensorSpec::new(DType::I64, &[context]),
            targets: TensorSpec::new(DType::I64, &[context]),
            task,
            image: Vec::new(),
        }
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
        let is_token = |token: &i64| (0..self.spec.task.outputs() as i64).contains(token);
        let bad = |tokens: &[i64]| tokens.iter().position(|token| !is_token(token));
        match bad(inputs).or_else(|| bad(last).map(|_| context)) {
            None => Ok(()),
            Some(index) => Err(Error::Data(format!(
                "{}, token {}: expected a token below {}, as at the start: the file has changed since the start",
                array.name(),
                first + index as u64,
                self.spec.task.outputs()
            ))),
        }
    }
}

impl Dataset for Windows {
    fn rows(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    /// Says what the tokens are, not where: the same tokens in files of another format are the same
    /// data, if they are cut into files at the same places.
    fn fingerprint(&self) -> Result<String> {
        Ok(format!(
            "windows {:?} of {} of {} tokens, {}, content {:016x}",
            self.range,
            self.firsts[self.files.arrays.len()],
            self.spec.inputs.elements(),
            self.spec.task,
            self.content
        ))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        self.watch.check()?;
        let context = self.spec.inputs.elements();
        inputs.with_slice_mut(|inputs: &mut [i64]| {
            targets.with_slice_mut(|targets: &mut [i64]| {
                let windows = inputs
                    .chunks_exact_mut(context)
                    .zip(targets.chunks_exact_mut(context));
                let mut rows = rows.iter().zip(windows);
                rows.try_for_each(|(&row, (inputs, targets))| self.read(row, inputs, targets))
            })
        })??
    }
}
