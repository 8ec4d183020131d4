# {{summary}}
{{steps}}
