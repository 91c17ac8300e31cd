//! Which part of a crate uses which other: follows every path in the code, through re-exports, to
//! the definition of the item that it names. A part is a file or a top-level module.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::modules::{Crate, Id, Name, is_cfg_test};

/// For each pair (user, used) of parts: the names used, each with the file and line of a use.
pub(crate) type Edges = BTreeMap<(usize, usize), BTreeMap<String, (usize, usize)>>;

/// What the parts of a crate are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parts {
    Files,
    /// The root's children, each with all modules below it; the root itself is part 0.
    TopLevelModules,
}

/// What a path leads to.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Target {
    Module(Id),
    /// An item, in the module that defines it.
    Item(Id, String),
    /// A `macro_rules!`, in the module that defines it.
    Macro(Id, String),
}

/// Names being looked up, so that imports that refer to each other end: (module, name, is last).
type Seen = HashSet<(Id, String, bool)>;

/// The edges between the parts of `krate`.
///
/// A parent that declares its child or re-exports from it does not use it. Everything else counts:
/// a `use`, and a path or an imported name in the code. A top-level module is also used by a path
/// that only goes through it, to an item that it re-exports.
pub(crate) fn edges(krate: &Crate, parts: Parts) -> Edges {
    let mut finder = Finder {
        krate,
        parts,
        edges: Edges::new(),
    };
    for (id, module) in krate.modules.iter().enumerate() {
        for (glob, line) in &module.globs {
            finder.goes_through(id, glob, *line);
        }
        for import in &module.imports {
            finder.goes_through(id, &import.path, import.line);
            for target in finder.resolve(id, &import.path, &mut Seen::new()) {
                if let Target::Item(at, name) | Target::Macro(at, name) = target
                    && !(import.exported && finder.is_inside(at, id))
                {
                    finder.add(id, at, &name, import.line);
                }
            }
        }
        for tokens in &module.tokens {
            finder.walk(id, tokens.clone());
        }
    }
    finder.edges
}

struct Finder<'a> {
    krate: &'a Crate,
    parts: Parts,
    edges: Edges,
}

impl Finder<'_> {
    fn add(&mut self, from: Id, to: Id, name: &str, line: usize) {
        let file = self.krate.modules[from].file;
        let part = |id: Id| match self.parts {
            Parts::Files => self.krate.modules[id].file,
            Parts::TopLevelModules => self.krate.top_level(id),
        };
        let (from, to) = (part(from), part(to));
        if from != to {
            let names = self.edges.entry((from, to)).or_default();
            names.entry(name.to_owned()).or_insert((file, line));
        }
    }

    /// Adds the top-level modules that `path` names on its way to an item.
    fn goes_through(&mut self, from: Id, path: &[String], line: usize) {
        for end in 1..=path.len() {
            for target in self.resolve(from, &path[..end], &mut Seen::new()) {
                if let (Target::Module(id @ 1..), Parts::TopLevelModules) = (target, self.parts)
                    && !self.is_inside(id, from)
                {
                    self.add(from, id, &path[end - 1], line);
                }
            }
        }
    }

    /// Whether `inner` is `outer` or one of its descendants.
    fn is_inside(&self, inner: Id, outer: Id) -> bool {
        let mut at = Some(inner);
        while let Some(id) = at {
            if id == outer {
                return true;
            }
            at = self.krate.modules[id].parent;
        }
        false
    }

    /// What `path` names, seen from the module `from`; empty for what other crates define.
    fn resolve(&self, from: Id, path: &[String], seen: &mut Seen) -> BTreeSet<Target> {
        let mut index = 0;
        let mut at: BTreeSet<Target> = BTreeSet::new();
        while index < path.len() {
            let last = index + 1 == path.len();
            at = match path[index].as_str() {
                "crate" => [Target::Module(0)].into(),
                "self" if index == 0 => [Target::Module(from)].into(),
                "super" => {
                    let start = if index == 0 {
                        Some(from)
                    } else {
                        only_module(&at)
                    };
                    let parent = start.and_then(|id| self.krate.modules[id].parent);
                    parent.map(Target::Module).into_iter().collect()
                }
                name if index == 0 => self.lookup(from, name, last, seen),
                name => {
                    let mut found = BTreeSet::new();
                    let mut items = BTreeSet::new();
                    for target in at {
                        match target {
                            Target::Module(id) => found.extend(self.lookup(id, name, last, seen)),
                            // A variant, a constant or a function of the item.
                            item => _ = items.insert(item),
                        }
                    }
                    if found.is_empty() { items } else { found }
                }
            };
            if at.is_empty() {
                break;
            }
            index += 1;
        }
        at
    }

    fn lookup(&self, module: Id, name: &str, last: bool, seen: &mut Seen) -> BTreeSet<Target> {
        let mut found = BTreeSet::new();
        if !seen.insert((module, name.to_owned(), last)) {
            return found;
        }
        if let Some(names) = self.krate.modules[module].names.get(name) {
            for what in names {
                match what {
                    Name::Module(id) => _ = found.insert(Target::Module(*id)),
                    Name::Item => _ = found.insert(Target::Item(module, name.to_owned())),
                    Name::Macro => _ = found.insert(Target::Macro(module, name.to_owned())),
                    Name::Import(path) => found.extend(self.resolve(module, path, seen)),
                }
            }
        }
        if found.is_empty() {
            for (glob, _) in &self.krate.modules[module].globs {
                for target in self.resolve(module, glob, &mut Seen::new()) {
                    if let Target::Module(id) = target {
                        found.extend(self.lookup(id, name, last, seen));
                    }
                }
            }
        }
        found
    }

    /// Adds an edge for every path in `tokens`.
    fn walk(&mut self, module: Id, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Punct(mark) if mark.as_char() == '#' => {
                    at = after_attribute(&tokens, at);
                }
                TokenTree::Group(group) => {
                    self.walk(module, group.stream());
                    at += 1;
                }
                TokenTree::Ident(_) => at = self.path(module, &tokens, at),
                _ => at += 1,
            }
        }
    }

    /// Reads the path that begins at `tokens[start]`; the index of the first token after it.
    fn path(&mut self, module: Id, tokens: &[TokenTree], start: usize) -> usize {
        let mut path = vec![tokens[start].to_string()];
        let mut at = start + 1;
        while is_mark(tokens.get(at), ':') && is_mark(tokens.get(at + 1), ':') {
            match tokens.get(at + 2) {
                Some(TokenTree::Ident(name)) => {
                    path.push(name.to_string());
                    at += 3;
                }
                // `use` inside a function: `path::{a, b}`.
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    self.group(module, &path, group.stream());
                    return at + 3;
                }
                _ => break,
            }
        }
        if !is_continued(tokens, start, &path[0]) {
            let single = path.len() == 1;
            let lowercase = path[0].starts_with(|c: char| c.is_lowercase());
            let is_macro = is_mark(tokens.get(at), '!') && !is_mark(tokens.get(at + 1), '=');
            let called = match tokens.get(at) {
                Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Parenthesis,
                _ => is_macro,
            };
            // A lone lowercase word that is not called is a variable or a field.
            if !(single && lowercase) || called {
                let line = tokens[start].span().start().line;
                self.uses(module, &path, line, is_macro);
            }
        }
        at
    }

    fn group(&mut self, module: Id, prefix: &[String], tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for part in tokens.split(|token| is_mark(Some(token), ',')) {
            let mut path = prefix.to_vec();
            for token in part {
                match token {
                    TokenTree::Ident(name) if name == "as" => break,
                    TokenTree::Ident(name) if name == "self" => {}
                    TokenTree::Ident(name) => path.push(name.to_string()),
                    TokenTree::Group(group) => {
                        self.group(module, &path, group.stream());
                        path.clear();
                    }
                    _ => {}
                }
            }
            if let Some(token) = part.first()
                && !path.is_empty()
            {
                self.uses(module, &path, token.span().start().line, false);
            }
        }
    }

    fn uses(&mut self, module: Id, path: &[String], line: usize, is_macro: bool) {
        self.goes_through(module, path, line);
        let targets = self.resolve(module, path, &mut Seen::new());
        if targets.is_empty() && is_macro && path.len() == 1 {
            self.uses_macro(module, &path[0], line);
        }
        for target in targets {
            match target {
                Target::Item(at, name) if !is_macro => self.add(module, at, &name, line),
                Target::Macro(at, name) if is_macro => self.add(module, at, &name, line),
                _ => {}
            }
        }
    }

    /// A macro that is in scope by its place in the text rather than by a path.
    fn uses_macro(&mut self, module: Id, name: &str, line: usize) {
        let mut defined = (0..self.krate.modules.len()).filter(|id| {
            let names = self.krate.modules[*id].names.get(name);
            names.is_some_and(|names| names.iter().any(|name| matches!(name, Name::Macro)))
        });
        if let (Some(at), None) = (defined.next(), defined.next()) {
            self.add(module, at, name, line);
        }
    }
}

fn only_module(targets: &BTreeSet<Target>) -> Option<Id> {
    targets.iter().find_map(|target| match target {
        Target::Module(id) => Some(*id),
        _ => None,
    })
}

fn is_mark(token: Option<&TokenTree>, mark: char) -> bool {
    matches!(token, Some(TokenTree::Punct(found)) if found.as_char() == mark)
}

/// Whether `tokens[start]` is not the start of a path: `.method`, `'lifetime`, `<T>::name`,
/// `$variable`, or the name in `fn name`.
fn is_continued(tokens: &[TokenTree], start: usize, name: &str) -> bool {
    let Some(before) = start.checked_sub(1) else {
        return false;
    };
    let two_before = before.checked_sub(1).and_then(|at| tokens.get(at));
    match &tokens[before] {
        TokenTree::Punct(mark) => match mark.as_char() {
            '.' => !is_mark(two_before, '.'),
            '$' => name != "crate",
            '\'' => true,
            ':' => is_mark(two_before, ':'),
            _ => false,
        },
        TokenTree::Ident(word) => word == "fn",
        _ => false,
    }
}

/// The index after the attribute at `tokens[at]`, and after what it leaves out of the build.
fn after_attribute(tokens: &[TokenTree], at: usize) -> usize {
    let Some(TokenTree::Group(group)) = tokens.get(at + 1) else {
        return at + 1;
    };
    if group.delimiter() != Delimiter::Bracket {
        return at + 1;
    }
    if !is_cfg_test(group.stream()) {
        // Derives and the like name nothing of this crate, and `#[serde(with = "…")]` is text.
        return at + 2;
    }
    let mut end = at + 2;
    while let Some(token) = tokens.get(end) {
        end += 1;
        let is_body =
            matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
        if is_body || is_mark(Some(token), ';') || is_mark(Some(token), ',') {
            break;
        }
    }
    end
}
