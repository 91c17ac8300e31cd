//! The classes of transformers that a gpt can be, each described by a text file; keys.txt explains
//! their lines.

use std::sync::LazyLock;

/// Files by their name. Where several classes express a model, the first one is exported.
const FILES: [(&str, &str); 12] = [
    ("keys", include_str!("keys.txt")),
    ("gpt2", include_str!("gpt2.txt")),
    ("llama", include_str!("llama.txt")),
    ("qwen2", include_str!("qwen2.txt")),
    ("qwen3", include_str!("qwen3.txt")),
    ("mistral", include_str!("mistral.txt")),
    ("ministral", include_str!("ministral.txt")),
    ("smollm3", include_str!("smollm3.txt")),
    ("olmo2", include_str!("olmo2.txt")),
    ("phi3", include_str!("phi3.txt")),
    ("gemma2", include_str!("gemma2.txt")),
    ("gemma3", include_str!("gemma3.txt")),
];

static ALL: LazyLock<Vec<Architecture>> = LazyLock::new(|| {
    let classes = FILES.iter().filter(|(_, text)| text.contains("\nclass "));
    classes
        .map(|(name, _)| Architecture {
            lines: lines_of(name),
        })
        .collect()
});

/// The words of lines about a key.
const TREATMENTS: [&str; 5] = ["setting", "special", "only", "irrelevant", "refused"];

/// The words of a line.
type KeyLine = Vec<&'static str>;

/// A class of transformers.
#[derive(Debug, PartialEq)]
pub(super) struct Architecture {
    /// The lines of its file before those of the file that it is like.
    lines: Vec<KeyLine>,
}

fn lines_of(name: &str) -> Vec<KeyLine> {
    let file = FILES.iter().find(|(known, _)| *known == name);
    let text = file.expect("tables name tables").1;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut lines: Vec<KeyLine> = lines
        .map(|line| line.split_whitespace().collect())
        .collect();
    if let Some(at) = lines.iter().position(|line| line[0] == "like") {
        let like = lines.remove(at)[1];
        lines.extend(lines_of(like));
    }
    lines
}

impl Architecture {
    pub(super) fn all() -> &'static [Architecture] {
        &ALL
    }

    /// What follows `word` in the first line that begins with it.
    pub(super) fn words(&self, word: &str) -> &[&'static str] {
        let line = self.lines.iter().find(|line| line[0] == word);
        line.map_or(&[], |line| &line[1..])
    }

    /// What follows `word` in each line that begins with it. Of those with the same next word, the
    /// first one counts; a key has one treatment.
    pub(super) fn all_words(&self, word: &str) -> Vec<&[&'static str]> {
        let mut all: Vec<&[&str]> = Vec::new();
        for line in self.lines.iter().filter(|line| line[0] == word) {
            if TREATMENTS.contains(&word) && self.treatment(line[1]).is_none_or(|it| it.0 != word) {
                continue;
            }
            if all.iter().all(|known| known[0] != line[1]) {
                all.push(&line[1..]);
            }
        }
        all
    }

    /// How `key` of config.json is treated, with what follows the key there.
    pub(super) fn treatment(&self, key: &str) -> Option<(&'static str, &[&'static str])> {
        let is_of_key = |line: &&KeyLine| TREATMENTS.contains(&line[0]) && line[1] == key;
        let line = self.lines.iter().find(is_of_key)?;
        Some((line[0], &line[2..]))
    }

    /// All keys with their treatments, and the value of those that must have one.
    #[cfg(test)]
    pub(super) fn keys(&self) -> Vec<(&'static str, &'static str, serde_json::Value)> {
        let mut all = Vec::new();
        for line in self.lines.iter().filter(|line| line.len() > 1) {
            if let Some((found, words)) = self.treatment(line[1]) {
                let word = words.first().copied().unwrap_or_default();
                let only = serde_json::from_str(word).unwrap_or(word.into());
                all.push((line[1], found, only));
            }
        }
        all
    }

    /// Its name in transformers.
    pub(super) fn class(&self) -> &'static str {
        self.words("class")[0]
    }

    pub(super) fn model_type(&self) -> &'static str {
        self.words("class")[1]
    }
}
